"""Builders of chunks, moments and plans, by hand and at random, and a short way to write actions.

Sizes of hand-built chunks are in units of the alignment, so that offsets are easy to follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from passes.plan import (
    ALIGNMENT,
    Action,
    Chunk,
    Direction,
    Home,
    Kind,
    Moment,
    Parameter,
    Rates,
    Schedule,
    Slot,
    StepPlan,
)
from passes.schedule import schedule
from passes.simulate import simulate

UNIT = ALIGNMENT
F32 = torch.float32

RATES = Rates(
    update_device=1e9,
    update_host=1e8,
    cast_host=1e9,
    flops={F32: 1e12},
    memory=1e12,
    h2d=1e9,
    d2h=5e8,
    transfer_latency=0.0,
    segment_latency=0.0,
)

Step = tuple[tuple[Chunk, ...], tuple[Moment, ...]]


def a_chunk(
    index: int, nbytes: int = UNIT, *, trained: bool = True, home: Home = Home.HOST
) -> Chunk:
    """A chunk whose only parameter has its index."""
    slot = Slot(parameter=index, offset=0, nbytes=nbytes)
    return Chunk(
        index=index,
        home=home,
        dtype=F32,
        requires_grad=trained,
        content=(slot,),
        nbytes=nbytes,
    )


def units(*sizes: int, trained: bool = True) -> tuple[Chunk, ...]:
    """Chunks of so many units each."""
    return tuple(a_chunk(i, size * UNIT, trained=trained) for i, size in enumerate(sizes))


def moments_of(
    *needs: Sequence[int], reduces: dict[int, Sequence[int]] | None = None
) -> tuple[Moment, ...]:
    """Moments that need these chunks; the backward begins with the first that reduces."""
    reduces = reduces or {}
    backward = min(reduces, default=len(needs))
    return tuple(
        Moment(
            index=i,
            direction=Direction.FORWARD if i < backward else Direction.BACKWARD,
            needs=tuple(chunks),
            reduces=tuple(reduces.get(i, ())),
            seconds=1e-6,
            live_bytes=100,
        )
        for i, chunks in enumerate(needs)
    )


def palindrome(count: int, *, trained: bool = True, nbytes: int = UNIT) -> Step:
    """A chain of equal chunks, forward and back, as a step of a deep model uses them."""
    order = [*range(count), *reversed(range(count))]
    chunks = tuple(a_chunk(i, nbytes, trained=trained) for i in range(count))
    reduces = {2 * count - 1 - i: [i] for i in range(count)} if trained else None
    return chunks, moments_of(*([i] for i in order), reduces=reduces)


def leaving(step: Step, *live: int, but: Sequence[int] = ()) -> Step:
    """The step with so many units of non-model data at each moment, and with gradients that may
    leave directly wherever one moment produces the whole of one, but for chunks ``but``.
    """
    chunks, moments = step
    times = Counter(c for m in moments for c in m.reduces)
    return chunks, tuple(
        replace(
            moment,
            live_bytes=size * UNIT,
            direct=tuple(
                (c, chunks[c].nbytes) for c in moment.reduces if times[c] == 1 and c not in but
            ),
        )
        for moment, size in zip(moments, live, strict=True)
    )


def parameters_of(chunks: Sequence[Chunk]) -> tuple[Parameter, ...]:
    """The parameters that the chunks hold."""
    found = {
        slot.parameter: Parameter(
            name=f"p{slot.parameter}",
            shape=(slot.nbytes,),
            dtype=chunk.dtype,
            nbytes=slot.nbytes,
            requires_grad=chunk.requires_grad,
        )
        for chunk in chunks
        for slot in chunk.content
    }
    return tuple(found[i] for i in sorted(found))


def as_plan(step: Step, scheduled: Schedule, *, slack: int | None = None) -> StepPlan:
    """The plan of a schedule; ``slack`` sets a budget of so many bytes above its peak."""
    chunks, moments = step
    timeline = simulate(chunks, moments, scheduled, RATES)
    unlimited = StepPlan(
        parameters=parameters_of(chunks),
        chunks=chunks,
        moments=moments,
        schedule=scheduled,
        budget_bytes=None,
        reserved_bytes=64,
        step_seconds=timeline.step_seconds,
        wait_seconds=timeline.wait_seconds,
    )
    if slack is None:
        return unlimited
    return replace(
        unlimited,
        budget_bytes=unlimited.peak_device_bytes + slack,
        arena_limit=scheduled.arena_bytes + slack,
    )


def planned(
    step: Step,
    capacity_bytes: int,
    *,
    prefetch: int | None = None,
    carry: bool = False,
    slack: int | None = 0,
) -> StepPlan:
    """Schedule a step and make its plan, with a budget of exactly its peak."""
    chunks, moments = step
    made = schedule(chunks, moments, capacity_bytes=capacity_bytes, prefetch=prefetch, carry=carry)
    return as_plan(step, made, slack=slack)


def written(actions: Sequence[Action]) -> list[str]:
    """Actions in short: ``"fetch 2 @1 <0,3"`` is chunk 2, to unit 1, after actions 0 and 3."""
    lines = []
    for action in actions:
        line = f"{action.kind} "
        line += f"m{action.moment}" if action.kind is Kind.COMPUTE else f"{action.chunk}"
        if action.offset is not None:
            assert action.offset % UNIT == 0
            line += f" @{action.offset // UNIT}"
        if action.after:
            line += " <" + ",".join(map(str, action.after))
        lines.append(line)
    return lines


_SIZES = [0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 3 * UNIT + 8, 5 * UNIT]


@st.composite
def random_chunks(draw: st.DrawFn) -> tuple[Chunk, ...]:
    """Chunks of one to three parameters: empty, frozen, at home on the device."""
    device = draw(st.integers(0, 3))
    chunks = []
    parameter = 0
    for index in range(draw(st.sampled_from([4, 5, 6, 7, 3, 2, 1]))):
        sizes = draw(st.lists(st.sampled_from(_SIZES), min_size=1, max_size=3))
        slots, end = [], 0
        for size in sizes:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            slots.append(Slot(parameter=parameter, offset=start, nbytes=size))
            end = start + size
            parameter += 1
        chunks.append(
            Chunk(
                index=index,
                home=Home.DEVICE if device == 0 and draw(st.booleans()) else Home.HOST,
                dtype=F32,
                requires_grad=draw(st.integers(0, 3)) > 0,
                content=tuple(slots),
                nbytes=end,
            )
        )
    return tuple(chunks)


@st.composite
def random_steps(draw: st.DrawFn) -> Step:
    """Steps as models make them and others: chains there and back, ties far apart, chunks used or
    reduced at any moments, gradients that may leave directly beside little and much other data.
    """
    chunks = draw(random_chunks())
    numbers = st.integers(0, len(chunks) - 1)
    several = st.lists(numbers, max_size=3, unique=True)
    count = draw(st.sampled_from([5, 3, 1]))
    if draw(st.booleans()):
        forward = [[c.index] for c in chunks]
        forward[-1] = list(dict.fromkeys([*forward[-1], *draw(several)]))  # a tie with the start
    else:
        forward = draw(st.lists(several, min_size=count, max_size=9))
    backward: list[list[int]] = []
    shape = draw(st.sampled_from(["mirror", "random", "none"]))
    if shape == "mirror":
        backward = [list(needs) for needs in reversed(forward)]
    elif shape == "random":
        backward = draw(st.lists(several, min_size=count, max_size=9))
    trained = [c.index for c in chunks if c.requires_grad]
    reduces: list[list[int]] = []
    for needs in backward:
        wanted = needs if draw(st.booleans()) else draw(several)
        reduces.append([c for c in wanted if c in trained])
    if shape == "mirror" and draw(st.booleans()):
        reduces = [[c for c in needs if c in trained] for needs in backward]
    steps = [(Direction.FORWARD, needs, []) for needs in forward]
    steps += [(Direction.BACKWARD, n, r) for n, r in zip(backward, reduces, strict=True)]
    times = Counter(c for reduced in reduces for c in reduced)
    may_leave = draw(st.sampled_from(["all", "some", "none"]))
    live = draw(st.sampled_from([st.integers(0, 4096), st.sampled_from([0, 0, 600, 1 << 14])]))

    def direct(reduced: list[int]) -> tuple[tuple[int, int], ...]:
        return tuple(
            (c, sum(slot.nbytes for slot in chunks[c].content))
            for c in reduced
            if times[c] == 1
            and (may_leave == "all" or (may_leave == "some" and draw(st.booleans())))
        )

    moments = tuple(
        Moment(
            index=i,
            direction=direction,
            needs=tuple(needs),
            reduces=tuple(reduced),
            seconds=draw(st.sampled_from([0.0, 1e-6, 1e-5])),
            live_bytes=draw(live),
            direct=direct(reduced),
        )
        for i, (direction, needs, reduced) in enumerate(steps)
    )
    return chunks, moments
