"""Arrange: homes and schedule together, for how much of the device is arena and how much is home.

In: chunks, moments, limits. Out: chunks with homes, moments with their bytes, the schedule, and its
predicted times. The more room the arena has, the further copies run ahead, and the fewer states
live on the device; a few divisions are simulated and the quickest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from passes.host import Kept, keep
from passes.limits import Choices, Limits
from passes.placement import fill, live_at_home, together
from passes.plan import Chunk, Home, Moment, PlanError, Rates, Schedule, align, staging_bytes
from passes.schedule import schedule
from passes.simulate import Timeline, simulate

_SLOTS = (3, 4, 6, 8, 12)
"""Arenas that are tried, in multiples of the largest chunk."""

OUTLINE_SLOTS = (6,)
"""The same, while the chunk size is still open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arranged:
    """A step with homes, its schedule and its times."""

    chunks: tuple[Chunk, ...]
    moments: tuple[Moment, ...]
    schedule: Schedule
    timeline: Timeline


def arrange(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    *,
    limits: Limits,
    choices: Choices,
    rates: Rates,
    whole: bool,
    slots: Sequence[int] = _SLOTS,
) -> Arranged:
    """Choose homes and schedule the step.

    Args:
        chunks: the chunks, whatever their home says; ``limits.states`` knows those that have one.
        moments: with their non-model bytes as if all chunks lived on the host.
        limits: the bounds.
        choices: the user's.
        rates: the machine's.
        whole: whether the step reads the whole model.
        slots: arenas to try, in multiples of the largest chunk.

    Raises:
        PlanError: if the step fits with no division; the one with the least on the device says why.
    """
    best: Arranged | None = None
    failure: PlanError | None = None
    for placed in _placements(chunks, moments, limits, choices, slots, whole=whole):
        try:
            for kept in keep(placed, moments, limits, choices):
                arranged = _scheduled(kept, moments, limits, choices, rates, whole=whole)
                if best is None or arranged.timeline.step_seconds < best.timeline.step_seconds:
                    best = arranged
        except PlanError as error:
            failure = error
    if best is None:
        assert failure is not None
        raise failure
    return best


def with_homes(
    moments: Sequence[Moment], chunks: Sequence[Chunk], choices: Choices
) -> tuple[Moment, ...]:
    """The moments with the bytes that chunks at home on the device add to them."""
    stay = choices.update != "backward"
    added = [0] * len(moments)
    for chunk in chunks:
        if chunk.home is Home.DEVICE:
            for position, nbytes in enumerate(live_at_home(chunk, moments, gradients_stay=stay)):
                added[position] += nbytes
    return tuple(
        replace(m, live_bytes=m.live_bytes + extra) if extra else m
        for m, extra in zip(moments, added, strict=True)
    )


def fixed_bytes(chunks: Sequence[Chunk], moments: Sequence[Moment], limits: Limits) -> int:
    """Bytes of the budget that the arena cannot have."""
    states = sum(c.device_bytes for c in chunks) + staging_bytes(chunks)
    return limits.reserved(chunks) + states + max((m.live_bytes for m in moments), default=0)


def _placements(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    limits: Limits,
    choices: Choices,
    slots: Sequence[int],
    *,
    whole: bool,
) -> Iterator[tuple[Chunk, ...]]:
    """Homes to try; the one with the least on the device comes last."""
    live = max((m.live_bytes for m in moments), default=0)
    if limits.everything_fits(live) or limits.budget_bytes is None:
        fits = limits.everything_fits(live)
        yield together(chunks, limits.states, Home.DEVICE if fits else Home.HOST)
        return
    seen = set()
    if whole and limits.arena_limit is None:
        largest = max((align(c.nbytes) for c in chunks), default=0)
        for count in slots:
            available = limits.budget_bytes - limits.reserved_bytes - count * largest
            placed = fill(
                chunks,
                moments,
                limits.states,
                available=available,
                gradients_stay=choices.update != "backward",
            )
            if placed not in seen:
                seen.add(placed)
                yield placed
    least = together(chunks, limits.states, Home.HOST)
    if whole and limits.arena_limit is None:
        # States that live on the device already may have to leave it.
        least = tuple(replace(c, home=Home.HOST) for c in least)
    if least not in seen:
        yield least


def _scheduled(
    kept: Kept,
    outside: Sequence[Moment],
    limits: Limits,
    choices: Choices,
    rates: Rates,
    *,
    whole: bool,
) -> Arranged:
    chunks = kept.chunks
    moments = with_homes(outside, chunks, choices)
    taken = fixed_bytes(chunks, moments, limits)
    if limits.budget_bytes is not None and taken > limits.budget_bytes:
        raise PlanError(
            f"without any chunk in the arena the step needs {taken} bytes, and there are "
            f"{limits.budget_bytes}",
            moment=max(moments, key=lambda m: m.live_bytes).index,
            needed_bytes=taken,
            available_bytes=limits.budget_bytes,
        )
    scheduled = schedule(
        chunks,
        moments,
        capacity_bytes=_capacity(chunks, moments, limits),
        prefetch=choices.prefetch,
        carry=choices.carry,
        whole=whole,
        update=choices.update == "backward" and whole,
        gradient_slots=kept.gradient_slots,
    )
    return Arranged(
        chunks=chunks,
        moments=moments,
        schedule=scheduled,
        timeline=simulate(
            chunks, moments, scheduled, rates, update_follows=choices.update is not None
        ),
    )


def _capacity(chunks: Sequence[Chunk], moments: Sequence[Moment], limits: Limits) -> int:
    """Bytes that the arena may use: what the budget leaves beside everything else."""
    total = 2 * sum(c.nbytes for c in chunks if c.home is Home.HOST) + 256 * len(chunks)
    if limits.arena_limit is not None:
        total = min(total, limits.arena_limit)
    if limits.budget_bytes is not None:
        total = min(total, limits.budget_bytes - fixed_bytes(chunks, moments, limits))
    return max(total, 0)
