"""The list of passes, from two captured graphs to a verified step plan.

    localize -> lifetimes -> chunk -> split -> liveness, cost, gradients -> place -> schedule
    -> verify

``outline`` runs up to the segments: their boundaries follow from the chunks' uses alone. The caller
may then compile the segments and read their real peaks. ``finish`` chooses homes, makes the
schedule for one set of sizes, and verifies it. The chunk size, and how much of the device is arena
and how much home, are chosen by simulating the candidates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy
from torch import fx

from passes.arrange import OUTLINE_SLOTS, arrange
from passes.chunking import candidate_sizes, chunk, layer_bytes
from passes.cost import segment_seconds
from passes.gradients import whole_gradients
from passes.lifetimes import Lifetimes, lifetimes
from passes.limits import Choices, Limits
from passes.liveness import Live, liveness
from passes.localize import localize
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
from passes.segments import Segment, split
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
        notes: what the user should know of how the graphs came about.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: Mapping[fx.Node, fx.Node]
    parameters: tuple[Parameter, ...]
    symbols: Mapping[sympy.Symbol, int]
    whole: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A step up to its segments: chunks, and the segments of both graphs in order.

    ``fixed`` are the chunks that were given. The homes of all are still open.
    """

    captured: Captured
    fixed: tuple[Chunk, ...]
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
    limits: Limits,
    choices: Choices,
    rates: Rates,
) -> Outline:
    """Run the passes up to the segments.

    Args:
        captured: the traced step. Its graphs are rewritten in place (``localize``).
        fixed: chunks that exist already; their layout stays.
        limits: the bounds.
        choices: the user's.
        rates: the machine's.
    """
    started = time.perf_counter()
    forward, backward = _localized(captured)
    cut_at = partial(_outline, captured, forward, backward, rates, {})
    uncut = cut_at(fixed=(), chunks=())
    fits = limits.everything_fits(max(peaks(uncut, None, captured.symbols), default=0))
    known = {slot.parameter for c in fixed for slot in c.content}
    order, spread = _first_uses(forward, backward)
    order = [p for p in order if p not in known]
    best: tuple[tuple[bool, float, int], Outline] | None = None
    for target in _targets(captured, order, limits, choices, everything_fits=fits):
        chunks = (
            *fixed,
            *_numbered(
                chunk(captured.parameters, order, spread, target_bytes=target), start=len(fixed)
            ),
        )
        candidate = cut_at(fixed=tuple(fixed), chunks=chunks)
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
    arranged = arrange(
        outlined.chunks,
        moments_of(outlined, internal, symbols),
        limits=limits,
        choices=choices,
        rates=rates,
        whole=outlined.captured.whole,
    )
    plan = StepPlan(
        parameters=outlined.captured.parameters,
        chunks=arranged.chunks,
        moments=arranged.moments,
        schedule=arranged.schedule,
        budget_bytes=limits.budget_bytes,
        reserved_bytes=limits.reserved(arranged.chunks),
        step_seconds=arranged.timeline.step_seconds,
        wait_seconds=arranged.timeline.wait_seconds,
        prefetch=choices.prefetch,
        arena_limit=limits.arena_limit,
        host_limit=limits.host_bytes,
        notes=outlined.captured.notes,
    )
    verify(plan)
    log.debug(
        "plan: %d of %d chunks at home on the device, %d actions in %.2f s",
        sum(c.home is Home.DEVICE for c in plan.chunks),
        len(plan.chunks),
        len(plan.schedule.actions),
        time.perf_counter() - started,
    )
    return plan


def estimated_peak(captured: Captured, rates: Rates) -> int:
    """Estimated peak bytes of non-model data of a step that is not cut into segments.

    Args:
        captured: the traced step. Its graphs are rewritten in place (``localize``).
        rates: the machine's.
    """
    forward, backward = _localized(captured)
    uncut = _outline(captured, forward, backward, rates, {}, fixed=(), chunks=())
    return max(peaks(uncut, None, captured.symbols), default=0)


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


def _localized(captured: Captured) -> tuple[Lifetimes, Lifetimes | None]:
    """The lifetimes in both graphs, after ``localize``."""
    localize(captured.forward)
    forward = lifetimes(captured.forward.graph)
    if captured.backward is None:
        return forward, None
    localize(captured.backward)
    return forward, lifetimes(captured.backward.graph)


def _outline(
    captured: Captured,
    forward: Lifetimes,
    backward: Lifetimes | None,
    rates: Rates,
    flops: dict[fx.Node, int],
    *,
    fixed: tuple[Chunk, ...],
    chunks: tuple[Chunk, ...],
) -> Outline:
    chunk_of = {s.parameter: c.index for c in chunks for s in c.content}
    forward_segments = split(forward, chunk_of, graph=captured.forward.graph)
    backward_segments: tuple[Segment, ...] = ()
    if backward is not None and captured.backward is not None:
        backward_segments = split(backward, chunk_of, graph=captured.backward.graph)
    segments = forward_segments + backward_segments
    return Outline(
        captured=captured,
        fixed=fixed,
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
    limits: Limits,
    choices: Choices,
    *,
    everything_fits: bool,
) -> Sequence[int | None]:
    if not order:
        return (None,)
    if everything_fits:
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
    """The moments for given sizes, as if all chunks lived on the host; arguments as in
    :func:`finish`.
    """
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


def _score(
    candidate: Outline, limits: Limits, choices: Choices, rates: Rates
) -> tuple[bool, float, int]:
    """Orders candidates: those that fit, by predicted time, then by traffic."""
    try:
        arranged = arrange(
            candidate.chunks,
            moments_of(candidate, None, candidate.captured.symbols),
            limits=limits,
            choices=choices,
            rates=rates,
            whole=candidate.captured.whole,
            slots=OUTLINE_SLOTS,
        )
    except PlanError as error:
        return (True, float(error.needed_bytes - error.available_bytes), 0)
    traffic = sum(a.nbytes for a in arranged.schedule.actions)
    return (False, arranged.timeline.step_seconds, traffic)
