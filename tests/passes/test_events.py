from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.events import order
from passes.plan import Action, Home, Kind, PlanError, Schedule, Stream, VerificationError
from passes.schedule import schedule, smallest_capacity
from passes.verify import verify
from tests.passes.plans import (
    UNIT,
    Step,
    as_plan,
    moments_of,
    palindrome,
    planned,
    random_steps,
    units,
    written,
)


def _action(kind: Kind, moment: int, chunk: int | None = None, at: int | None = None) -> Action:
    return Action(
        index=0,
        kind=kind,
        moment=moment,
        chunk=chunk,
        offset=None if at is None else at * UNIT,
        nbytes=0 if at is None else UNIT,
    )


def _ordered(step: Step, actions: Sequence[Action]) -> list[str]:
    chunks, moments = step
    made = order(actions, {c.index: c for c in chunks}, {m.index: m for m in moments})
    verify(as_plan(step, Schedule(actions=made, arena_bytes=4 * UNIT)))
    return written(made)


def test_a_fetch_waits_for_the_last_readers_of_its_bytes() -> None:
    step = units(1, 1, 1), moments_of([0], [1], [2])
    actions = [
        _action(Kind.FETCH, 0, 0, 0),
        _action(Kind.FETCH, 0, 1, 1),
        _action(Kind.WAIT, 0, 0),
        _action(Kind.COMPUTE, 0),
        _action(Kind.RELEASE, 0, 0),
        _action(Kind.WAIT, 1, 1),
        _action(Kind.COMPUTE, 1),
        _action(Kind.RELEASE, 1, 1),
        _action(Kind.FETCH, 2, 2, 0),
        _action(Kind.WAIT, 2, 2),
        _action(Kind.COMPUTE, 2),
        _action(Kind.RELEASE, 2, 2),
    ]
    # Chunk 2 takes the place that m0 read; m1, though later, read other bytes.
    assert _ordered(step, actions)[8] == "fetch 2 @0 <3"
    elsewhere = [replace(a, offset=2 * UNIT) if a.chunk == 2 and a.nbytes else a for a in actions]
    assert _ordered(step, elsewhere)[8] == "fetch 2 @2", "nobody used these bytes"


def test_what_an_event_implies_is_not_waited_for_again() -> None:
    step = units(1, 1), moments_of([0], [1], reduces={0: [0]})
    made = _ordered(
        step,
        [
            _action(Kind.FETCH, 0, 0, 0),
            _action(Kind.WAIT, 0, 0),
            _action(Kind.COMPUTE, 0),
            _action(Kind.RELEASE, 0, 0),
            _action(Kind.REDUCE, 0, 0, 0),
            _action(Kind.OFFLOAD, 0, 0, 0),
            _action(Kind.FETCH, 1, 1, 0),
            _action(Kind.WAIT, 1, 1),
            _action(Kind.COMPUTE, 1),
            _action(Kind.RELEASE, 1, 1),
        ],
    )
    # The offload is behind the reduce, which is behind the compute.
    assert made[4:7] == ["reduce 0 @0", "offload 0 @0 <4", "fetch 1 @0 <5"]


def test_a_gradient_over_another_ones_bytes_waits_for_its_offload() -> None:
    step = units(1, 1), moments_of([0, 1], [], reduces={0: [0], 1: [1]})
    made = _ordered(
        step,
        [
            _action(Kind.FETCH, 0, 0, 0),
            _action(Kind.FETCH, 0, 1, 1),
            _action(Kind.WAIT, 0, 0),
            _action(Kind.WAIT, 0, 1),
            _action(Kind.COMPUTE, 0),
            _action(Kind.RELEASE, 0, 0),
            _action(Kind.RELEASE, 0, 1),
            _action(Kind.REDUCE, 0, 0, 0),
            _action(Kind.OFFLOAD, 0, 0, 0),
            _action(Kind.COMPUTE, 1),
            _action(Kind.REDUCE, 1, 1, 0),
            _action(Kind.OFFLOAD, 1, 1, 0),
        ],
    )
    assert made[10] == "reduce 1 @0 <8"


def test_a_fetch_over_two_ranges_waits_for_the_users_of_both() -> None:
    step = units(1, 1, 2), moments_of([0], [1], [2], reduces={0: [0]})
    actions = [
        _action(Kind.FETCH, 0, 0, 0),
        _action(Kind.FETCH, 0, 1, 1),
        _action(Kind.WAIT, 0, 0),
        _action(Kind.COMPUTE, 0),
        _action(Kind.RELEASE, 0, 0),
        _action(Kind.REDUCE, 0, 0, 0),
        _action(Kind.OFFLOAD, 0, 0, 0),
        _action(Kind.WAIT, 1, 1),
        _action(Kind.COMPUTE, 1),
        _action(Kind.RELEASE, 1, 1),
        replace(_action(Kind.FETCH, 2, 2, 0), nbytes=2 * UNIT),
        _action(Kind.WAIT, 2, 2),
        _action(Kind.COMPUTE, 2),
        _action(Kind.RELEASE, 2, 2),
    ]
    assert _ordered(step, actions)[10] == "fetch 2 @0 <6,8"


def _schedule(step: Step, room: float, prefetch: int | None, carry: bool) -> Schedule | None:
    chunks, moments = step
    smallest = smallest_capacity(chunks, moments, prefetch=prefetch, carry=carry)
    try:
        return schedule(
            chunks, moments, capacity_bytes=int(smallest * room), prefetch=prefetch, carry=carry
        )
    except PlanError:
        return None


_any_schedule = given(
    random_steps(),
    st.sampled_from([1.0, 1.0, 1.2, 1.5, 3.0]),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@_any_schedule
def test_events_are_sufficient(step: Step, room: float, prefetch: int | None, carry: bool) -> None:
    """By the closure of all orders, over all pairs of accesses: apart from ``verify``."""
    made = _schedule(step, room, prefetch, carry)
    if made is None:
        return
    behind: list[int] = []  # bit sets of all actions that are complete before
    last: dict[Stream, int] = {}
    for action in made.actions:
        known = 0
        queued = (last[action.stream],) if action.stream in last else ()
        for before in (*action.after, *queued):
            known |= behind[before] | 1 << before
        behind.append(known)
        last[action.stream] = action.index
    accesses = _accesses(step, made)
    for later, start, end, writes in accesses:
        for earlier, low, high, wrote in accesses:
            if earlier < later and (writes or wrote) and start < high and low < end:
                assert behind[later] >> earlier & 1, (earlier, later)


def _accesses(step: Step, made: Schedule) -> list[tuple[int, int, int, bool]]:
    """Action, first byte, end, and whether it writes. A gradient without a place in the arena has
    one of its own at negative offsets; to discard it is to write there.
    """
    found = []
    place: dict[int, tuple[int, int]] = {}
    for action in made.actions:
        if action.kind is Kind.COMPUTE:
            for chunk in step[1][action.moment].needs:
                if step[0][chunk].home is Home.HOST and step[0][chunk].nbytes:
                    found.append((action.index, *place[chunk], False))
        elif action.offset is not None and action.nbytes and action.chunk is not None:
            span = (action.offset, action.offset + action.nbytes)
            found.append((action.index, *span, action.kind is not Kind.OFFLOAD))
            if action.kind is Kind.FETCH:
                place[action.chunk] = span
        elif action.kind in (Kind.REDUCE, Kind.OFFLOAD, Kind.DISCARD):
            assert action.chunk is not None
            span = (-1 - action.chunk, -action.chunk)
            found.append((action.index, *span, action.kind is not Kind.OFFLOAD))
    return found


@settings(max_examples=50, deadline=None)
@_any_schedule
def test_events_are_necessary(step: Step, room: float, prefetch: int | None, carry: bool) -> None:
    made = _schedule(step, room, prefetch, carry)
    if made is None:
        return
    verify(as_plan(step, made))
    for action in made.actions:
        streams = [made.actions[before].stream for before in action.after]
        assert action.stream not in streams and len(streams) == len(set(streams))
        for before in action.after:
            source = made.actions[before]
            named = (action.kind, source.kind) in (
                (Kind.WAIT, Kind.FETCH),
                (Kind.OFFLOAD, Kind.REDUCE),
                (Kind.DISCARD, Kind.OFFLOAD),
            )
            if named and action.chunk == source.chunk:
                continue
            actions = list(made.actions)
            rest = tuple(a for a in action.after if a != before)
            actions[action.index] = replace(action, after=rest)
            with pytest.raises(VerificationError, match="race"):
                verify(as_plan(step, replace(made, actions=tuple(actions))))


def test_numbers_and_events_do_not_depend_on_earlier_ones() -> None:
    chunks, moments = palindrome(5)
    made = planned((chunks, moments), 2 * UNIT).schedule
    by_chunk = {c.index: c for c in chunks}
    again = order(
        [replace(a, index=7, after=()) for a in made.actions], by_chunk, dict(enumerate(moments))
    )
    assert again == made.actions
