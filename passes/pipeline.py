"""The list of passes, from two captured graphs to a verified step plan.

    localize -> lifetimes -> (place) -> chunk -> split -> liveness, cost, gradients -> schedule
    -> verify

``outline`` runs up to the segments: their boundaries follow from the chunks' uses alone. The caller
may then compile the segments and read their real peaks. ``finish`` makes the schedule for one set
of sizes and verifies it. The chunk size is chosen by simulating the candidates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy
from torch import fx

from passes.chunking import candidate_sizes, chunk, layer_bytes
from passes.cost import segment_seconds
from passes.gradients import whole_gradients
from passes.lifetimes import Lifetimes, lifetimes
from passes.liveness import Live, liveness
from passes.localize import localize
from passes.placement import place
from passes.plan import (
    Chunk,
    Direction,
    Home,
    Moment,
    Parameter,
    PlanError,
    Rates,
    StepPlan,
)
from passes.schedule import schedule
from passes.segments import Segment, split
from passes.simulate import simulate
from passes.verify import verify

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What the passes get of one traced step.

    Attributes:
        forward: the forward graph; fetch nodes are tagged, see ``passes.graph``.
        backward: the backward graph; None for inference.
        saved: backward placeholder -> forward output, for what the forward saves.
        parameters: all managed parameters that the graphs read, and those that share a chunk of
            ``fixed`` with them.
        symbols: the present value of each symbolic size.
        whole: whether the graphs are all that the model runs in a step.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: Mapping[fx.Node, fx.Node]
    parameters: tuple[Parameter, ...]
    symbols: Mapping[sympy.Symbol, int]
    whole: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds a plan. Bytes; None: unlimited.

    Attributes:
        budget_bytes: device memory that the step may use.
        arena_limit: bytes that resident chunks may use of it.
        reserved_bytes: device memory taken by neither chunks nor non-model data of the graphs.
        master_bytes: what masters and their gradients take beyond compute copies, where the home
            is the device.
        state_bytes: what ``placement`` needs to know: all model states, on the device.
        resident_bytes: and their part that a step reads and writes.
    """

    budget_bytes: int | None
    arena_limit: int | None
    reserved_bytes: int
    master_bytes: int
    state_bytes: int
    resident_bytes: int

    def reserved(self, chunks: Sequence[Chunk]) -> int:
        """All bytes that are neither compute copies and gradients nor non-model data."""
        device = any(c.home is Home.DEVICE for c in chunks)
        return self.reserved_bytes + (self.master_bytes if device else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What the user decided instead of the plan: see the backend's options."""

    prefetch: int | None = None
    chunk_bytes: int | None = None
    carry: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A step up to its segments: chunks, and the segments of both graphs in order.

    ``fixed`` are the chunks that were given, ``home`` is the home of all.
    """

    captured: Captured
    fixed: tuple[Chunk, ...]
    home: Home
    chunks: tuple[Chunk, ...]
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    seconds: tuple[float, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments; the position is the moment."""
        return self.forward + self.backward


def outline(
    captured: Captured,
    *,
    fixed: Sequence[Chunk],
    home: Home | None,
    limits: Limits,
    choices: Choices,
    rates: Rates,
) -> Outline:
    """Run the passes up to the segments.

    Args:
        captured: the traced step. Its graphs are rewritten in place (``localize``).
        fixed: chunks that exist already; their layout stays.
        home: the home of existing chunks; None: still free.
        limits: the bounds.
        choices: the user's.
        rates: the machine's.
    """
    started = time.perf_counter()
    localize(captured.forward)
    forward = lifetimes(captured.forward.graph)
    backward = None
    if captured.backward is not None:
        localize(captured.backward)
        backward = lifetimes(captured.backward.graph)
    cut_at = partial(_outline, captured, forward, backward, rates, {})
    if home is None:
        whole = cut_at(fixed=(), home=Home.DEVICE, chunks=(), cut=())
        peak = max(peaks(whole, None, captured.symbols), default=0)
        home = place(
            state_bytes=limits.state_bytes,
            resident_bytes=limits.resident_bytes,
            live_bytes=peak + limits.reserved_bytes,
            budget_bytes=limits.budget_bytes,
            arena_limit=limits.arena_limit,
        )
    known = {slot.parameter for c in fixed for slot in c.content}
    order, spread = _first_uses(forward, backward)
    order = [p for p in order if p not in known]
    best: tuple[tuple[bool, float, int], Outline] | None = None
    for target in _targets(captured, order, home, limits, choices):
        chunks = (
            *fixed,
            *_numbered(
                chunk(captured.parameters, order, spread, target_bytes=target, home=home),
                start=len(fixed),
            ),
        )
        cut = chunks if target is not None else [c for c in chunks if c.home is Home.HOST]
        candidate = cut_at(fixed=tuple(fixed), home=home, chunks=chunks, cut=cut)
        score = _score(candidate, limits, choices, rates)
        if best is None or score < best[0]:
            best = (score, candidate)
    assert best is not None
    log.debug(
        "outline: %d chunks, %d segments in %.2f s",
        len(best[1].chunks),
        len(best[1].segments),
        time.perf_counter() - started,
    )
    return best[1]


def finish(
    outlined: Outline,
    *,
    internal: Mapping[int, int] | None,
    symbols: Mapping[sympy.Symbol, int],
    limits: Limits,
    choices: Choices,
    rates: Rates,
) -> StepPlan:
    """Make the plan for concrete sizes, and verify it.

    Args:
        outlined: what :func:`outline` made.
        internal: peak bytes by moment, where known from compiled code, of a segment's own
            allocations and of the inputs that die inside it (``Live.dying``).
        symbols: the value of each symbolic size.
        limits: the bounds.
        choices: the user's.
        rates: the machine's.

    Raises:
        PlanError: if the step cannot fit; ``explain`` finds out what would.
    """
    started = time.perf_counter()
    moments = moments_of(outlined, internal, symbols)
    taken = fixed_bytes(outlined.chunks, moments, limits)
    if limits.budget_bytes is not None and taken > limits.budget_bytes:
        raise PlanError(
            f"without any chunk in the arena the step needs {taken} bytes, and there are "
            f"{limits.budget_bytes}",
            moment=max(moments, key=lambda m: m.live_bytes).index,
            needed_bytes=taken,
            available_bytes=limits.budget_bytes,
        )
    scheduled = schedule(
        outlined.chunks,
        moments,
        capacity_bytes=_capacity(outlined.chunks, moments, limits),
        prefetch=choices.prefetch,
        carry=choices.carry,
        whole=outlined.captured.whole,
    )
    timeline = simulate(outlined.chunks, moments, scheduled, rates)
    plan = StepPlan(
        parameters=outlined.captured.parameters,
        chunks=outlined.chunks,
        moments=moments,
        schedule=scheduled,
        budget_bytes=limits.budget_bytes,
        reserved_bytes=limits.reserved(outlined.chunks),
        step_seconds=timeline.step_seconds,
        wait_seconds=timeline.wait_seconds,
        prefetch=choices.prefetch,
        arena_limit=limits.arena_limit,
    )
    verify(plan)
    log.debug("plan: %d actions in %.2f s", len(scheduled.actions), time.perf_counter() - started)
    return plan


def lives(outlined: Outline, symbols: Mapping[sympy.Symbol, int]) -> tuple[Live, ...]:
    """Non-model bytes of each moment for given sizes; see ``passes.liveness``."""
    captured = outlined.captured
    return liveness(
        outlined.forward,
        outlined.backward,
        captured.forward.graph,
        None if captured.backward is None else captured.backward.graph,
        saved=captured.saved,
        symbols=symbols,
    )


def peaks(
    outlined: Outline, internal: Mapping[int, int] | None, symbols: Mapping[sympy.Symbol, int]
) -> list[int]:
    """Peak non-model bytes of each moment; ``internal`` as in :func:`finish`."""
    return [
        live.held + (internal or {}).get(moment, live.own)
        for moment, live in enumerate(lives(outlined, symbols))
    ]


def _outline(
    captured: Captured,
    forward: Lifetimes,
    backward: Lifetimes | None,
    rates: Rates,
    flops: dict[fx.Node, int],
    *,
    fixed: tuple[Chunk, ...],
    home: Home,
    chunks: tuple[Chunk, ...],
    cut: Sequence[Chunk],
) -> Outline:
    chunk_of = {s.parameter: c.index for c in cut for s in c.content}
    forward_segments = split(forward, chunk_of, graph=captured.forward.graph)
    backward_segments: tuple[Segment, ...] = ()
    if backward is not None and captured.backward is not None:
        backward_segments = split(backward, chunk_of, graph=captured.backward.graph)
    segments = forward_segments + backward_segments
    return Outline(
        captured=captured,
        fixed=fixed,
        home=home,
        chunks=chunks,
        forward=forward_segments,
        backward=backward_segments,
        seconds=tuple(segment_seconds(s, rates, flops) for s in segments),
    )


def _first_uses(forward: Lifetimes, backward: Lifetimes | None) -> tuple[list[int], dict[int, int]]:
    """Parameters in first-use order, and in how many places apart each is used."""
    order: dict[int, None] = {}
    last: dict[int, int] = {}
    regions: dict[int, int] = {}
    used: dict[int, None] = {}
    for uses in forward.uses:
        for parameter in sorted(uses):
            order.setdefault(parameter)
            # Another region begins where other parameters were used since the last use.
            if parameter not in last or len(used) > last[parameter] + 8:
                regions[parameter] = regions.get(parameter, 0) + 1
            used.setdefault(parameter)
            last[parameter] = len(used)
    for lifetime in (backward,) if backward is not None else ():
        for uses in lifetime.uses:
            for parameter in sorted(uses):
                order.setdefault(parameter)
        for _, parameter, _ in lifetime.gradients:
            order.setdefault(parameter)
    return list(order), regions


def _targets(
    captured: Captured,
    order: Sequence[int],
    home: Home,
    limits: Limits,
    choices: Choices,
) -> Sequence[int | None]:
    if not order:
        return (None,)
    if home is Home.DEVICE:
        # Nothing moves, but the segments of equal layers are compiled once.
        return (layer_bytes(captured.parameters, order),)
    if choices.chunk_bytes is not None:
        return (choices.chunk_bytes,)
    bounds = [b for b in (limits.budget_bytes, limits.arena_limit) if b is not None]
    return candidate_sizes(captured.parameters, order, capacity_bytes=min(bounds))


def _numbered(chunks: Sequence[Chunk], *, start: int) -> list[Chunk]:
    return [replace(c, index=start + i) for i, c in enumerate(chunks)]


def moments_of(
    outlined: Outline, internal: Mapping[int, int] | None, symbols: Mapping[sympy.Symbol, int]
) -> tuple[Moment, ...]:
    """The moments for given sizes; arguments as in :func:`finish`."""
    live = peaks(outlined, internal, symbols)
    chunk_of = {s.parameter: c.index for c in outlined.chunks for s in c.content}
    at_once = whole_gradients(outlined.segments, outlined.chunks)
    moments = []
    for index, segment in enumerate(outlined.segments):
        forward = index < len(outlined.forward)
        moments.append(
            Moment(
                index=index,
                direction=Direction.FORWARD if forward else Direction.BACKWARD,
                needs=tuple(sorted({chunk_of[p] for p in segment.parameters})),
                reduces=tuple(dict.fromkeys(chunk_of[p] for p, _ in segment.gradients)),
                seconds=outlined.seconds[index],
                live_bytes=live[index],
                direct=at_once[index],
            )
        )
    return tuple(moments)


def _capacity(chunks: Sequence[Chunk], moments: Sequence[Moment], limits: Limits) -> int:
    """Bytes that the arena may use: what the budget leaves beside everything else."""
    total = 2 * sum(c.nbytes for c in chunks) + 256 * len(chunks)
    if limits.arena_limit is not None:
        total = min(total, limits.arena_limit)
    if limits.budget_bytes is not None:
        total = min(total, limits.budget_bytes - fixed_bytes(chunks, moments, limits))
    return total


def fixed_bytes(chunks: Sequence[Chunk], moments: Sequence[Moment], limits: Limits) -> int:
    """Bytes of the budget that the arena cannot have."""
    states = sum(c.nbytes for c in chunks if c.home is Home.DEVICE)
    return limits.reserved(chunks) + states + max((m.live_bytes for m in moments), default=0)


def _score(
    candidate: Outline, limits: Limits, choices: Choices, rates: Rates
) -> tuple[bool, float, int]:
    """Orders candidates: those that fit, by predicted time, then by traffic."""
    moments = moments_of(candidate, None, candidate.captured.symbols)
    capacity = _capacity(candidate.chunks, moments, limits)
    try:
        scheduled = schedule(
            candidate.chunks,
            moments,
            capacity_bytes=max(capacity, 0),
            prefetch=choices.prefetch,
            carry=choices.carry,
            whole=candidate.captured.whole,
        )
    except PlanError as error:
        return (True, float(error.needed_bytes - error.available_bytes), 0)
    timeline = simulate(candidate.chunks, moments, scheduled, rates)
    return (False, timeline.step_seconds, sum(a.nbytes for a in scheduled.actions))
