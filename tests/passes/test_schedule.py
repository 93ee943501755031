from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.direct import direct
from passes.plan import Direction, Home, Kind, PlanError, Schedule, align
from passes.schedule import schedule, smallest_capacity
from passes.verify import verify
from tests.passes.plans import (
    UNIT,
    Step,
    a_chunk,
    as_plan,
    leaving,
    moments_of,
    palindrome,
    planned,
    random_steps,
    units,
    written,
)


def _actions(step: Step, room: int, prefetch: int | None = None) -> list[str]:
    plan = planned(step, room * UNIT, prefetch=prefetch)
    verify(plan)
    return written(plan.schedule.actions)


def test_what_fits_is_fetched_once_and_each_gradient_takes_its_chunks_place() -> None:
    step = units(1, 1), moments_of([0], [1], [1], [0], reduces={2: [1], 3: [0]})
    assert _actions(step, 2) == [
        "fetch 0 @0",
        "wait 0 <0",
        "compute m0",
        "fetch 1 @1",
        "wait 1 <3",
        "compute m1",
        "compute m2",
        "release 1",
        "reduce 1 @1",
        "offload 1 @1 <8",
        "compute m3",
        "release 0",
        "reduce 0 @0",
        "offload 0 @0 <12",
    ]


def test_what_is_used_last_makes_room_and_fetches_wait_for_the_bytes_last_readers() -> None:
    step = units(1, 1, 1), moments_of([0], [1], [2], [1], [0])
    assert _actions(step, 2) == [
        "fetch 0 @0",
        "wait 0 <0",
        "compute m0",
        "fetch 1 @1",
        # Chunk 0 is used again, but after chunk 2.
        "release 0",
        "fetch 2 @0 <2",
        "wait 1 <3",
        "compute m1",
        "wait 2 <5",
        "compute m2",
        "release 2",
        "fetch 0 @0 <9",
        "compute m3",
        "release 1",
        "wait 0 <11",
        "compute m4",
        "release 0",
    ]


def test_a_gradient_that_is_due_before_its_chunks_last_use_gets_a_place_of_its_own() -> None:
    reduces = {2: [2], 3: [1, 0], 4: [0]}
    step = units(2, 1, 1), moments_of([0, 1], [2], [2], [1], [0], reduces=reduces)
    assert _actions(step, 4) == [
        "fetch 0 @0",
        "fetch 1 @2",
        "wait 0 <0",
        "wait 1 <1",
        "compute m0",
        "fetch 2 @3",
        # Its two units are the only ones in which its own gradient can lie from m3 on.
        "release 0",
        "wait 2 <5",
        "compute m1",
        "compute m2",
        "release 2",
        "reduce 2 @3",
        "offload 2 @3 <11",
        "compute m3",
        "release 1",
        "reduce 1 @2",
        "offload 1 @2 <15",
        "reduce 0 @0",
        # Behind the second offload, and so behind the first.
        "fetch 0 @2 <16",
        "wait 0 <18",
        "compute m4",
        "release 0",
        "reduce 0 @0",
        "offload 0 @0 <22",
    ]


def test_without_prefetching_a_fetch_comes_right_before_its_use() -> None:
    step = units(1, 1, 1), moments_of([0], [1], [2], [2], [1])
    assert _actions(step, 2, prefetch=0) == [
        "fetch 0 @0",
        "wait 0 <0",
        "compute m0",
        "release 0",
        "fetch 1 @0 <2",
        "wait 1 <4",
        "compute m1",
        "fetch 2 @1",
        "wait 2 <7",
        "compute m2",
        "compute m3",
        "release 2",
        "compute m4",
        "release 1",
    ]


def test_a_gradient_that_leaves_directly_needs_no_place_and_is_discarded_later() -> None:
    # Beside the forward's last moment everything else has room for all four gradients.
    assert _actions(leaving(palindrome(4), 0, 0, 0, 4, 0, 0, 0, 0), 2) == [
        "fetch 0 @0",
        "wait 0 <0",
        "compute m0",
        "fetch 1 @1",
        "release 0",
        "fetch 2 @0 <2",
        "wait 1 <3",
        "compute m1",
        "release 1",
        "fetch 3 @1 <7",
        "wait 2 <5",
        "compute m2",
        # What the step before left behind: there is room for it until here.
        "discard 2",
        "discard 1",
        "discard 0",
        "wait 3 <9",
        "compute m3",
        "compute m4",
        "release 3",
        "reduce 3",
        "offload 3 <19",
        # Behind the last reader of these bytes: no gradient is put there.
        "fetch 1 @1 <17",
        "compute m5",
        "release 2",
        "reduce 2",
        "offload 2 <24",
        "fetch 0 @0 <22",
        "wait 1 <21",
        "compute m6",
        "release 1",
        "reduce 1",
        "offload 1 <30",
        # Held while m5 and m6 compute.
        "discard 3 <20",
        "wait 0 <26",
        "compute m7",
        "release 0",
        "reduce 0",
        "offload 0 <36",
    ]


def test_gradients_without_room_have_a_place_beside_those_that_leave_directly() -> None:
    # There is room only while m5 computes: chunk 2's gradient must lie in the arena until then,
    # and the others' are discarded before the next step computes anything.
    assert _actions(leaving(palindrome(3), 2, 2, 2, 2, 2, 1), 2) == [
        "discard 1",
        "discard 0",
        "fetch 0 @0",
        "wait 0 <2",
        "compute m0",
        "fetch 1 @1",
        "release 0",
        "fetch 2 @0 <4",
        "wait 1 <5",
        "compute m1",
        "wait 2 <7",
        "compute m2",
        "compute m3",
        "release 2",
        "reduce 2 @0",
        "offload 2 @0 <14",
        "fetch 0 @0 <15",
        "compute m4",
        "release 1",
        "reduce 1",
        "offload 1 <19",
        "wait 0 <16",
        "compute m5",
        "release 0",
        "reduce 0",
        "offload 0 <24",
    ]


def test_what_leaves_directly_adds_nothing_to_the_smallest_capacity() -> None:
    chunks = units(1, 3)
    moments = moments_of([0], [0], [], reduces={1: [0, 1]})

    def smallest(*live: int) -> int:
        step = leaving((chunks, moments), *live)
        return smallest_capacity(*step, prefetch=None, carry=False)

    assert smallest(0, 0, 0) == 4 * UNIT, "no room for either while m2 computes"
    assert smallest(1, 0, 0) == 3 * UNIT, "for chunk 0"
    assert smallest(3, 0, 0) == 3 * UNIT, "chunk 0 comes first"
    assert smallest(4, 0, 0) == UNIT, "for both"


def _forward_only(count: int) -> Step:
    """A palindrome whose backward does not read chunk 0: an embedding's weights, say."""
    chunks, moments = palindrome(count)
    return chunks, moments[:-1]


def test_what_the_backward_does_not_read_is_fetched_again_for_the_next_step() -> None:
    plan = planned(_forward_only(3), 2 * UNIT, carry=True)
    verify(plan)
    assert plan.schedule.carried == (0,)
    assert written(plan.schedule.actions) == [
        "fetch 0 @0",
        "wait 0 <0",
        "compute m0",
        "fetch 1 @1",
        # It makes room for chunk 2, though it is kept.
        "release 0",
        "fetch 2 @0 <2",
        "wait 1 <3",
        "compute m1",
        "wait 2 <5",
        "compute m2",
        "compute m3",
        "release 2",
        "reduce 2 @0",
        "offload 2 @0 <12",
        # It comes back to where it began, as soon as that is free, and nobody waits for it.
        "fetch 0 @0 <13",
        "compute m4",
        "release 1",
        "reduce 1 @1",
        "offload 1 @1 <17",
    ]


def test_what_has_room_through_the_step_is_not_fetched_again() -> None:
    plan = planned(_forward_only(3), 3 * UNIT, carry=True)
    verify(plan)
    assert plan.schedule.carried == (0, 1)
    assert [a.chunk for a in plan.actions(Kind.FETCH)] == [0, 1, 2]


def test_only_what_is_carried_comes_back() -> None:
    chunks, moments = palindrome(4)
    plan = planned((chunks, moments[:-2]), 2 * UNIT, carry=True)
    verify(plan)
    # The backward does not read chunk 1 either, but there is no room to keep it as well.
    assert plan.schedule.carried == (0,)
    assert [a.chunk for a in plan.actions(Kind.FETCH)] == [0, 1, 2, 3, 0]


def test_without_carrying_nothing_is_fetched_for_the_next_step() -> None:
    plan = planned(_forward_only(3), 2 * UNIT)
    assert plan.schedule.carried == ()
    assert [a.chunk for a in plan.actions(Kind.FETCH)] == [0, 1, 2]


def test_chunks_at_home_on_the_device_are_only_reduced() -> None:
    chunks = (a_chunk(0, home=Home.DEVICE), a_chunk(1, trained=False, home=Home.DEVICE))
    step = chunks, moments_of([0], [1], [0], reduces={2: [0]})
    plan = planned(step, 0)
    verify(plan)
    assert written(plan.schedule.actions) == ["compute m0", "compute m1", "compute m2", "reduce 0"]
    assert plan.schedule.arena_bytes == 0


def test_an_error_names_the_moment_the_bytes_and_the_remedy() -> None:
    step = units(1, 3, 2), moments_of([0], [1, 2], [2])
    with pytest.raises(PlanError, match="raise the capacity by 256 bytes") as caught:
        schedule(*step, capacity_bytes=4 * UNIT)
    assert caught.value.moment == 1
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5 * UNIT, 4 * UNIT)
    assert smallest_capacity(*step, prefetch=None, carry=False) == 5 * UNIT


def test_prefetch_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="at least 0 moments, got -1"):
        schedule(*palindrome(2), capacity_bytes=8 * UNIT, prefetch=-1)


# Belady: equal chunks, one per moment.


def _fetches(made: Schedule) -> int:
    return sum(a.kind is Kind.FETCH for a in made.actions)


def _fewest_fetches(accesses: Sequence[int], room: int) -> int:
    """Brute force: all choices of what makes room, at every access."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in accesses:
        following: dict[frozenset[int], int] = {}
        for state, cost in states.items():
            if chunk in state:
                choices = [(state, cost)]
            elif len(state) < room:
                choices = [(state | {chunk}, cost + 1)]
            else:
                choices = [(state - {gone} | {chunk}, cost + 1) for gone in state]
            for choice, total in choices:
                following[choice] = min(total, following.get(choice, total))
        states = following
    return min(states.values())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("room", [8, 16, 32])
@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_a_palindrome_misses_only_what_does_not_fit(
    prefetch: int | None, room: int, trained: bool
) -> None:
    step = palindrome(44, trained=trained)
    made = schedule(*step, capacity_bytes=room * UNIT, prefetch=prefetch)
    verify(as_plan(step, made))
    # At the turn the last ones are there; everything else comes in a second time.
    assert _fetches(made) == 44 + (44 - room)


def test_the_formula_for_palindromes_is_the_optimum() -> None:
    for count, room in product(range(2, 8), range(1, 4)):
        accesses = [*range(count), *reversed(range(count))]
        assert _fewest_fetches(accesses, room) == count + max(count - room, 0)


_accesses = st.lists(st.integers(0, 5), min_size=1, max_size=24)


@settings(max_examples=300, deadline=None)
@given(_accesses, st.integers(1, 5))
def test_fetches_of_equal_chunks_are_as_few_as_can_be(accesses: list[int], room: int) -> None:
    step = units(1, 1, 1, 1, 1, 1), moments_of(*([c] for c in accesses))
    made = schedule(*step, capacity_bytes=room * UNIT, prefetch=0)
    verify(as_plan(step, made))
    assert _fetches(made) == _fewest_fetches(accesses, room)


@settings(max_examples=300, deadline=None)
@given(_accesses, st.integers(1, 5), st.sampled_from([1, 3, None]))
def test_prefetching_pushes_out_only_what_is_used_later(
    accesses: list[int], room: int, prefetch: int | None
) -> None:
    step = units(1, 1, 1, 1, 1, 1), moments_of(*([c] for c in accesses))
    made = schedule(*step, capacity_bytes=room * UNIT, prefetch=prefetch)
    verify(as_plan(step, made))
    place: dict[int, int] = {}
    pushed_out: dict[int, int] = {}
    for action in made.actions:
        if action.kind is Kind.FETCH:
            assert action.chunk is not None and action.offset is not None
            assert _next_use(step, made, action.index) < pushed_out.pop(action.offset, 99)
            place[action.chunk] = action.offset
        elif action.kind is Kind.RELEASE:
            assert action.chunk is not None
            later = [
                a.moment
                for a in made.actions[action.index :]
                if a.kind is Kind.COMPUTE and action.chunk in step[1][a.moment].needs
            ]
            pushed_out[place.pop(action.chunk)] = min(later, default=99)


# Any step.


def _extent(sizes: Sequence[int]) -> int:
    """Fewest bytes for blocks side by side: the last one needs no padding."""
    total = sum(map(align, sizes))
    return min((total - align(size) + size for size in sizes), default=0)


def _bound(step: Step) -> int:
    """Bytes that some moment cannot do without."""
    chunks, moments = step
    host = [c.index for c in chunks if c.home is Home.HOST]
    placeless = direct(chunks, moments).nbytes
    reduced = {c: [m.index for m in moments if c in m.reduces and c not in placeless] for c in host}
    most = 0
    for moment in moments:
        needs = [chunks[c].nbytes for c in moment.needs if c in host]
        running = [c for c in host if reduced[c] and reduced[c][0] < moment.index <= reduced[c][-1]]
        ended = [c for c in host if reduced[c] and reduced[c][0] <= moment.index <= reduced[c][-1]]
        most = max(most, _extent([*needs, *(chunks[c].nbytes for c in running)]))
        most = max(most, _extent([chunks[c].nbytes for c in ended]))
    return most


def _check(step: Step, room: float, prefetch: int | None, carry: bool) -> None:
    chunks, moments = step
    bound = _bound(step)
    capacity = int(bound * room)

    def attempt(capacity_bytes: int) -> Schedule:
        return schedule(
            chunks, moments, capacity_bytes=capacity_bytes, prefetch=prefetch, carry=carry
        )

    smallest = smallest_capacity(chunks, moments, prefetch=prefetch, carry=carry)
    assert smallest >= bound
    at_smallest = attempt(smallest)
    verify(as_plan(step, at_smallest, slack=0))
    assert at_smallest.arena_bytes <= smallest
    try:
        made = attempt(capacity)
    except PlanError as error:
        assert error.available_bytes == capacity
        assert error.needed_bytes <= bound
        if error.needed_bytes > capacity:
            assert capacity < bound
        else:
            assert capacity < smallest
        return
    assert capacity >= bound
    assert made.arena_bytes <= capacity
    assert made == attempt(capacity), "deterministic"
    verify(as_plan(step, made, slack=0))
    _replay(step, made)
    assert carry or not made.carried
    if prefetch is not None and not carry:
        for action in made.actions:
            if action.kind is Kind.FETCH:
                use = _next_use(step, made, action.index)
                assert use - action.moment <= prefetch
    has_backward = any(m.direction is Direction.BACKWARD for m in moments)
    if not has_backward:
        assert {a.kind for a in made.actions}.isdisjoint((Kind.REDUCE, Kind.OFFLOAD, Kind.DISCARD))


def _replay(step: Step, made: Schedule) -> None:
    """Run two steps, the second without the first fetches of carried chunks: everything that a
    moment or an offload reads must be there, whole. Gradients without a place are there while a
    moment computes only if the step's largest moment needs as much.
    """
    chunks, moments = step
    arena: dict[int, str] = {}
    held: dict[int, int] = {}
    most = max((m.live_bytes for m in moments), default=0)
    for number, skipped in enumerate((set[int](), set(made.carried))):
        ready: dict[int, int] = {}
        gradients: dict[int, set[int]] = {}
        for action in made.actions:
            if action.kind is Kind.COMPUTE:
                for needed in moments[action.moment].needs:
                    if chunks[needed].home is Home.HOST:
                        assert _held(arena, f"copy {needed}") == align(chunks[needed].nbytes)
                assert moments[action.moment].live_bytes + sum(held.values()) <= most
            if action.chunk is None or chunks[action.chunk].home is Home.DEVICE:
                continue
            chunk = action.chunk
            if action.kind is Kind.DISCARD:
                assert chunk in held or number == 0, "the first step finds nothing to discard"
                held.pop(chunk, None)
            elif action.kind is Kind.REDUCE and action.offset is None:
                ready[chunk] = dict(moments[action.moment].direct)[chunk]
            elif action.kind is Kind.OFFLOAD and action.offset is None:
                assert chunk not in held and action.nbytes == ready[chunk]
                held[chunk] = ready.pop(chunk)
            if action.offset is None:
                continue
            places = range(action.offset, action.offset + action.nbytes, UNIT)
            if action.kind is Kind.FETCH and chunk in skipped:
                skipped.remove(chunk)
            elif action.kind is Kind.FETCH:
                arena = {at: what for at, what in arena.items() if what != f"copy {chunk}"}
                arena |= dict.fromkeys(places, f"copy {chunk}")
            elif action.kind is Kind.REDUCE and chunk not in gradients:
                gradients[chunk] = {action.moment}
                arena |= dict.fromkeys(places, f"gradient {chunk}")
            elif action.kind is Kind.REDUCE:
                assert _held(arena, f"gradient {chunk}") == align(action.nbytes)
                gradients[chunk].add(action.moment)
            elif action.kind is Kind.OFFLOAD:
                assert _held(arena, f"gradient {chunk}") == align(action.nbytes)
                assert all(arena[at] == f"gradient {chunk}" for at in places)
                assert gradients[chunk] == {m.index for m in moments if chunk in m.reduces}
                arena = {at: what for at, what in arena.items() if what != f"gradient {chunk}"}


def _held(arena: dict[int, str], what: str) -> int:
    """Bytes of the arena that hold this."""
    return UNIT * sum(held == what for held in arena.values())


def _next_use(step: Step, made: Schedule, fetch: int) -> int:
    """The first moment computed after an action that needs the action's chunk."""
    chunk = made.actions[fetch].chunk
    return next(
        a.moment
        for a in made.actions[fetch:]
        if a.kind is Kind.COMPUTE and chunk in step[1][a.moment].needs
    )


def _any_step(examples: int) -> Callable[[Callable[..., None]], Callable[[], None]]:
    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        given_steps = given(
            random_steps(),
            st.sampled_from([1.0, 1.1, 1.3, 1.0, 1.7, 2.5, 100.0, 0.9, 0.5]),
            st.sampled_from([None, 0, 1, 2, 5]),
            st.booleans(),
        )
        return settings(max_examples=examples, deadline=None)(given_steps(test))

    return decorate


@_any_step(200)
def test_any_step(step: Step, room: float, prefetch: int | None, carry: bool) -> None:
    _check(step, room, prefetch, carry)


@pytest.mark.sweep
@_any_step(2000)
def test_many_steps(step: Step, room: float, prefetch: int | None, carry: bool) -> None:
    _check(step, room, prefetch, carry)
