"""Explain: why a step does not fit, and the smallest limits with which it does.

In: the error of a plan that failed, and what it was made from. Out: an error for users, with the
moment, the bytes, and figures that were found by planning anew: with another limit, or without the
option ``chunk_bytes``, other chunks may be chosen. Only runs when a plan has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sympy

from passes.arrange import fixed_bytes
from passes.limits import Choices, Limits
from passes.pipeline import Outline, finish, moments_of, outline
from passes.plan import ALIGNMENT, Chunk, PlanError, Rates
from passes.schedule import smallest_capacity

_PRECISION = 100
"""A stated limit is at most one part in so many larger than one that was seen to fail."""

_BELOW = (98, 95, 90, 80)
"""Percent of a limit that works at which smaller ones are looked for."""


def explain(
    error: PlanError,
    outlined: Outline,
    *,
    internal: Mapping[int, int] | None,
    symbols: Mapping[sympy.Symbol, int],
    fixed: Sequence[Chunk],
    limits: Limits,
    choices: Choices,
    rates: Rates,
) -> PlanError:
    """The error to raise for a failed plan.

    Args:
        error: what ``finish`` raised.
        outlined: what it was given.
        internal: as given to ``finish``.
        symbols: as given to ``finish``.
        fixed: as given to ``outline``.
        limits: as given to both.
        choices: as given to both.
        rates: as given to both.
    """

    def fitting(changed: Limits, choices: Choices = choices) -> Outline | None:
        captured = replace(outlined.captured, symbols={**outlined.captured.symbols, **symbols})
        again = outline(captured, fixed=fixed, limits=changed, choices=choices, rates=rates)
        # What the compiler allocates is known for the segments that were compiled.
        known = internal if again.chunks == outlined.chunks else None
        try:
            finish(
                again,
                internal=known,
                symbols=symbols,
                limits=changed,
                choices=choices,
                rates=rates,
            )
        except PlanError:
            return None
        return again

    def fits(changed: Limits) -> bool:
        return fitting(changed) is not None

    if limits.host_bytes is not None and fits(replace(limits, host_bytes=None)):
        return _host(error, limits, fits)
    moments = moments_of(outlined, internal, symbols)
    least = smallest_capacity(
        outlined.chunks,
        moments,
        prefetch=choices.prefetch,
        carry=choices.carry,
        whole=outlined.captured.whole,
    )
    peak = max(moments, key=lambda m: m.live_bytes)
    taken = fixed_bytes(outlined.chunks, moments, limits)
    parts = []
    smallest = None
    if limits.arena_limit is not None:
        free = replace(limits, budget_bytes=None)
        if not fits(free):
            smallest = _smallest(
                lambda n: fits(replace(free, arena_limit=n)), limits.arena_limit, least
            )
            parts.append(
                f"arena_memory is {limits.arena_limit} bytes; raise it to at least {smallest} bytes"
            )
    if limits.budget_bytes is not None:
        free = replace(limits, arena_limit=None)
        if not parts or not fits(free):
            smallest = _smallest(
                lambda n: fits(replace(free, budget_bytes=n)),
                limits.budget_bytes,
                taken + least,
            )
            parts.append(
                f"device_memory is {limits.budget_bytes} bytes, of which non-model data takes "
                f"{peak.live_bytes} at moment {peak.index} ({peak.direction}) and "
                f"{taken - peak.live_bytes} are reserved; raise device_memory to at least "
                f"{smallest} bytes, or use a smaller batch or activation checkpointing"
            )
    where = "" if error.moment is None else f" at moment {error.moment}"
    if limits.budget_bytes is not None and taken > limits.budget_bytes:
        reason = str(error)
    else:
        reason = (
            f"chunks need {error.needed_bytes} bytes of arena there, and {error.available_bytes} "
            f"bytes are left for them"
        )
    advice = ". ".join(parts)
    if choices.chunk_bytes is not None:
        chosen = fitting(limits, replace(choices, chunk_bytes=None))
        if chosen is not None:
            largest = max(chunk.nbytes for chunk in chosen.chunks)
            advice = (
                f"The option chunk_bytes is {choices.chunk_bytes} bytes; without it the step fits, "
                f"in chunks of at most {largest} bytes. Or: {advice}"
            )
    return PlanError(
        f"the step does not fit{where}: {reason}. {advice}",
        moment=error.moment,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        smallest_budget=smallest,
    )


def _host(error: PlanError, limits: Limits, fits: Callable[[Limits], bool]) -> PlanError:
    """The error where the host's memory is what is missing."""
    assert limits.host_bytes is not None
    smallest = _smallest(
        lambda n: fits(replace(limits, host_bytes=n)), limits.host_bytes, error.needed_bytes
    )
    return PlanError(
        f"the step does not fit: {error}. Raise host_memory, now {limits.host_bytes} bytes, to at "
        f"least {smallest} bytes, or device_memory, so that more states live there",
        moment=error.moment,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        smallest_budget=smallest,
    )


def _smallest(fits: Callable[[int], bool], fails: int, guess: int) -> int:
    """Bisect between a limit that fails and the first that fits from ``guess`` on."""
    given, works = fails, max(guess, fails + 1)
    while not fits(works):
        fails, works = works, works + max(works // 8, ALIGNMENT)
    works = _bisect(fits, fails, works)
    # Other limits lead to other chunks, so that one may work below others that do not.
    for percent in _BELOW:
        lower = works * percent // 100
        if lower > given and fits(lower):
            works = _bisect(fits, given, lower)
    return works


def _bisect(fits: Callable[[int], bool], fails: int, works: int) -> int:
    while works - fails > max(works // _PRECISION, ALIGNMENT):
        middle = (works + fails) // 2
        if fits(middle):
            works = middle
        else:
            fails = middle
    return works
