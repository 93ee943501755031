from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.plan import ALIGNMENT, Kind, PlanError, Rates, Stream
from passes.schedule import schedule
from passes.simulate import simulate
from tests.passes.plans import (
    F32,
    RATES,
    UNIT,
    Step,
    moments_of,
    palindrome,
    planned,
    random_steps,
    units,
)

MICRO = 1e-6


def test_timeline_of_a_small_plan() -> None:
    chunks = units(4, 8)
    moments = moments_of([0], [1], [1], [0], reduces={2: [1], 3: [0]})
    moments = tuple(replace(m, seconds=(3, 5, 7, 11)[m.index] * MICRO) for m in moments)
    rates = Rates(
        update_device=1e9,
        update_host=1e8,
        cast_host=1e9,
        flops={F32: 1.0},
        memory=2 * UNIT / MICRO,
        h2d=UNIT / MICRO,
        d2h=UNIT / (2 * MICRO),
        transfer_latency=0.5 * MICRO,
        segment_latency=0.25 * MICRO,
    )
    made = schedule(chunks, moments, capacity_bytes=12 * UNIT)
    timeline = simulate(chunks, moments, made, rates)
    expected = {
        "fetch 0": (0.0, 4.5),
        "wait 0": (4.5, 4.5),
        "compute m0": (4.5, 7.75),
        "fetch 1": (4.5, 13.0),
        "wait 1": (13.0, 13.0),
        "compute m1": (13.0, 18.25),
        "compute m2": (18.25, 25.5),
        "release 1": (25.5, 25.5),
        "reduce 1": (25.5, 33.5),
        "offload 1": (33.5, 50.0),
        "compute m3": (33.5, 44.75),
        "release 0": (44.75, 44.75),
        "reduce 0": (44.75, 48.75),
        "offload 0": (50.0, 58.5),
    }
    found = {}
    for action, span in zip(made.actions, timeline.spans, strict=True):
        what = f"m{action.moment}" if action.kind is Kind.COMPUTE else action.chunk
        found[f"{action.kind} {what}"] = tuple(round(t / MICRO, 6) for t in span)
    # Chunk 1 is issued after m0 but copied behind chunk 0, beside m0; its gradient is written while
    # nothing is copied out, and the second offload waits for the first, not for its own reduce.
    assert found == expected
    assert timeline.step_seconds == pytest.approx(58.5 * MICRO)
    assert timeline.wait_seconds == pytest.approx((4.5 + 13.0 - 7.75) * MICRO)


def test_an_empty_schedule_takes_no_time() -> None:
    made = schedule((), (), capacity_bytes=0)
    timeline = simulate(
        (),
        (),
        made,
        Rates(
            update_device=1e9,
            update_host=1e8,
            cast_host=1e9,
            flops={F32: 1.0},
            memory=1.0,
            h2d=1.0,
            d2h=1.0,
        ),
    )
    assert (timeline.spans, timeline.step_seconds, timeline.wait_seconds) == ((), 0.0, 0.0)


def test_prefetching_hides_transfers() -> None:
    step = palindrome(12, nbytes=4 * UNIT)
    chunks, moments = step
    # A moment takes as long as its copy takes.
    moments = tuple(replace(m, seconds=4 * UNIT / 1e9) for m in moments)
    none = planned((chunks, moments), 6 * 4 * UNIT, prefetch=0)
    some = planned((chunks, moments), 6 * 4 * UNIT, prefetch=None)
    assert none.h2d_bytes == some.h2d_bytes
    assert some.wait_seconds < none.wait_seconds / 2
    assert some.step_seconds < none.step_seconds


def test_the_first_fetch_of_a_carried_chunk_takes_no_time() -> None:
    plan = planned(palindrome(7), 5 * UNIT, carry=True)
    carried = plan.schedule.carried
    assert carried
    spans = simulate(plan.chunks, plan.moments, plan.schedule, RATES).spans
    seen = set()
    for action in plan.actions(Kind.FETCH):
        start, end = spans[action.index]
        skipped = action.chunk in carried and action.chunk not in seen
        assert end - start == pytest.approx(0.0 if skipped else UNIT / RATES.h2d)
        seen.add(action.chunk)
    assert any(sum(a.chunk == c for a in plan.actions(Kind.FETCH)) > 1 for c in carried)


_rate = st.sampled_from([1e6, 1e8, 1e9, 1e12])
_rates = st.builds(
    lambda memory, h2d, d2h, transfer, segment: Rates(
        update_device=1e9,
        update_host=1e8,
        cast_host=1e9,
        flops={F32: 1.0},
        memory=memory,
        h2d=h2d,
        d2h=d2h,
        transfer_latency=transfer,
        segment_latency=segment,
    ),
    _rate,
    _rate,
    _rate,
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from([0.0, 1e-5]),
)


@settings(max_examples=100, deadline=None)
@given(random_steps(), _rates, st.sampled_from(["memory", "h2d", "d2h"]), st.integers(0, 30))
def test_properties(step: Step, rates: Rates, faster: str, room: int) -> None:
    chunks, moments = step
    try:
        made = schedule(chunks, moments, capacity_bytes=room * ALIGNMENT)
    except PlanError:
        return
    timeline = simulate(chunks, moments, made, rates)
    ends = dict.fromkeys(Stream, 0.0)
    busy = dict.fromkeys(Stream, 0.0)
    for action, (start, end) in zip(made.actions, timeline.spans, strict=True):
        assert ends[action.stream] <= start <= end, "one action at a time, in order"
        assert all(timeline.spans[b][1] <= start for b in action.after)
        latest = max([ends[action.stream], *(timeline.spans[b][1] for b in action.after)])
        assert start == latest, "no idling without a reason"
        ends[action.stream] = end
        busy[action.stream] += end - start
    assert timeline.step_seconds == max(ends.values())
    compute = ends[Stream.COMPUTE]
    assert timeline.wait_seconds == pytest.approx(compute - busy[Stream.COMPUTE], abs=1e-12)
    quicker = replace(rates, **{faster: getattr(rates, faster) * 10})
    assert simulate(chunks, moments, made, quicker).step_seconds <= timeline.step_seconds
