"""What the host keeps: states always, compute copies and gradient memory while there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.host import Kept, keep
from passes.limits import Choices, Limits, Update
from passes.placement import States
from passes.plan import Chunk, Home, Kind, Moment, PlanError, Schedule, StepPlan, VerificationError
from passes.schedule import schedule
from passes.simulate import host_update_seconds, simulate
from passes.verify import verify
from tests.passes.plans import RATES, UNIT, Step, leaving, palindrome, parameters_of

MASTER = 2 * UNIT
"""Bytes of a master: twice those of its compute copy."""

STATES = 3 * MASTER
"""Master and two moments."""


def _step(count: int, *, cast: bool = True) -> tuple[Step, States]:
    chunks, moments = palindrome(count)
    states = States(
        nbytes=(STATES if cast else 2 * UNIT,) * count,
        room=(0,) * count,
        cast=(cast,) * count,
        masters=(MASTER if cast else UNIT,) * count,
        homes=(None,) * count,
        model_bytes=count * (STATES + 2 * UNIT),
        resident_bytes=count * 2 * UNIT,
        others_bytes=0,
    )
    return (tuple(states.of(c) for c in chunks), moments), states


def _ways(
    step: Step, states: States, host_bytes: int | None, update: Update | None = None
) -> list[Kept]:
    limits = Limits(
        budget_bytes=None,
        host_bytes=host_bytes,
        arena_limit=None,
        reserved_bytes=0,
        states=states,
    )
    return list(keep(*step, limits, Choices(update=update)))


def _copies(kept: Kept) -> str:
    return "".join("-" if chunk.masters else "c" for chunk in kept.chunks)


def test_with_room_for_all_all_is_kept() -> None:
    step, states = _step(3)
    everything = 3 * (STATES + UNIT + UNIT)
    for limit in (None, everything):
        (kept,) = _ways(step, states, limit)
        assert kept.chunks == step[0] and kept.gradient_slots is None


@pytest.mark.parametrize(("missing", "copies"), [(1, "cc-"), (UNIT, "cc-"), (UNIT + 1, "c--")])
def test_the_last_compute_copies_go_first(missing: int, copies: str) -> None:
    step, states = _step(3)
    (kept,) = _ways(step, states, 3 * (STATES + UNIT + UNIT) - missing)
    assert _copies(kept) == copies
    slim = kept.chunks[-1]
    assert [(s.parameter, s.offset, s.nbytes) for s in slim.masters] == [(2, 0, MASTER)]
    assert (slim.fetch_bytes, slim.host_bytes) == (MASTER, STATES)


def test_gradients_take_turns_when_the_backward_updates() -> None:
    step, states = _step(4)
    limit = 4 * (STATES + UNIT) + 2 * UNIT
    found = [(_copies(k), k.gradient_slots) for k in _ways(step, states, limit, "backward")]
    # Eight slots would take more than the gradients themselves, and there is no room for that.
    assert found == [("cc--", None), ("cccc", 2), ("cc--", 4), ("----", 2)]
    (only,) = _ways(step, states, limit, "step")
    assert (_copies(only), only.gradient_slots) == ("cc--", None)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_device_may_cast_what_the_host_would(update: Update) -> None:
    step, states = _step(3)
    everything, cast_free = _ways(step, states, None, update)
    assert everything.chunks == step[0]
    for chunk in cast_free.chunks:
        assert chunk.wide and chunk.masters
        assert (chunk.host_casts, chunk.gradient_bytes, chunk.fetch_bytes) == (0, MASTER, MASTER)
    assert [c.host_casts for c in everything.chunks] == [2, 2, 2]
    assert host_update_seconds(everything.chunks[0], RATES) > host_update_seconds(
        cast_free.chunks[0], RATES
    )
    limit = 3 * (STATES + MASTER)
    assert [k.chunks[0].wide for k in _ways(step, states, limit, update)][-1]
    if update == "step":
        # The states and the wide gradients of all chunks are what it needs.
        assert not any(k.chunks[0].wide for k in _ways(step, states, limit - 1, update))


def test_nothing_is_cast_for_an_optimizer_that_the_plan_does_not_run() -> None:
    step, states = _step(3)
    assert len(_ways(step, states, None)) == 1
    step, states = _step(3, cast=False)
    assert len(_ways(step, states, None, "backward")) == 1


@pytest.mark.parametrize("direct", [False, True])
def test_wide_gradients_are_counted_as_they_move(direct: bool) -> None:
    step, states = _step(4)
    if direct:
        step = leaving(step, *[4] * 8)
    cast_free = _ways(step, states, None, "backward")[-1]
    plan = _plan((cast_free.chunks, step[1]), cast_free, None)
    verify(plan)
    offsets = {a.offset is None for a in plan.actions(Kind.OFFLOAD)}
    assert direct in offsets
    assert plan.d2h_bytes == 4 * MASTER
    assert plan.host_gradient_bytes == 4 * MASTER
    assert plan.peak_host_bytes == 4 * (STATES + MASTER)
    assert plan.staging_bytes == MASTER + MASTER
    broken = [
        (replace(plan.chunks[0], masters=()), "casts its gradient, but fetches no masters"),
        (_uneven(plan.chunks[0]), "casts its gradient to masters of several dtypes"),
    ]
    for chunk, problem in broken:
        with pytest.raises(VerificationError, match=problem):
            verify(replace(plan, chunks=(chunk, *plan.chunks[1:])))


def _uneven(chunk: Chunk) -> Chunk:
    """A chunk of two parameters, with masters two and four times as long."""
    slot, master = chunk.content[0], chunk.masters[0]
    return replace(
        chunk,
        content=(slot, replace(slot, parameter=9, offset=UNIT)),
        masters=(master, replace(master, parameter=9, offset=MASTER, nbytes=2 * MASTER)),
    )


def test_compute_copies_that_are_the_masters_stay() -> None:
    step, states = _step(2, cast=False)
    with pytest.raises(PlanError, match=r"need \d+ bytes of host memory, and there are"):
        _ways(step, states, 2 * (2 * UNIT + UNIT + UNIT) - 1)


def test_too_little_for_the_states_is_refused_with_the_bytes() -> None:
    step, states = _step(3)
    for update, least in (("step", 3 * (STATES + UNIT)), ("backward", 3 * STATES + 2 * UNIT)):
        with pytest.raises(PlanError) as error:
            _ways(step, states, least - 1, update)  # type: ignore[arg-type]
        assert error.value.needed_bytes == least
        assert _ways(step, states, least, update)  # type: ignore[arg-type]


def _plan(step: Step, kept: Kept, limit: int | None) -> StepPlan:
    chunks, moments = kept.chunks, step[1]
    made = schedule(
        chunks,
        moments,
        capacity_bytes=3 * UNIT,
        update=True,
        gradient_slots=kept.gradient_slots,
    )
    timeline = simulate(chunks, moments, made, RATES, update_follows=True)
    return StepPlan(
        parameters=parameters_of(chunks),
        chunks=chunks,
        moments=moments,
        schedule=made,
        budget_bytes=None,
        reserved_bytes=0,
        step_seconds=timeline.step_seconds,
        wait_seconds=timeline.wait_seconds,
        host_limit=limit,
    )


@given(count=st.integers(1, 8), spare=st.integers(0, 20 * UNIT))
def test_every_way_gives_a_valid_plan_within_the_limit(count: int, spare: int) -> None:
    step, states = _step(count)
    limit = count * STATES + spare
    try:
        ways = _ways(step, states, limit, "backward")
    except PlanError as error:
        assert error.needed_bytes > limit
        return
    for kept in ways:
        plan = _plan(step, kept, limit)
        verify(plan)
        assert plan.peak_host_bytes <= limit
        fetched = sum(plan.chunks[a.chunk].fetch_bytes for a in plan.actions(Kind.FETCH))
        assert plan.h2d_bytes == fetched


def test_an_offload_waits_for_the_update_that_gives_its_slot_back() -> None:
    (chunks, moments), _ = _step(4)
    made = schedule(chunks, moments, capacity_bytes=3 * UNIT, update=True, gradient_slots=2)
    by_kind: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    for action in made.actions:
        by_kind[action.kind].append(action.index)
    offloads = [made.actions[i] for i in by_kind[Kind.OFFLOAD]]
    updates = by_kind[Kind.UPDATE_HOST]
    waits = [[i for i in action.after if i in updates] for action in offloads]
    assert waits == [[], [], [updates[0]], [updates[1]]]


def _without(made: Schedule, waits_for: Kind) -> Schedule:
    actions = tuple(
        replace(a, after=tuple(i for i in a.after if made.actions[i].kind is not waits_for))
        if a.kind is Kind.OFFLOAD
        else a
        for a in made.actions
    )
    return replace(made, actions=actions)


def test_verify_finds_what_the_host_cannot_hold() -> None:
    step, states = _step(4)
    limit = 4 * STATES + 2 * UNIT
    kept = next(k for k in _ways(step, states, limit, "backward") if k.gradient_slots == 2)
    plan = _plan(step, kept, limit)
    verify(plan)
    assert _copies(kept) == "----"

    def broken(**changes: object) -> str:
        with pytest.raises(VerificationError) as error:
            verify(replace(plan, **changes))  # type: ignore[arg-type]
        return str(error.value)

    assert "its limit is" in broken(host_limit=limit - 1)
    unordered = _without(plan.schedule, Kind.UPDATE_HOST)
    assert "finds 2 gradients waiting in 2 slots" in broken(schedule=unordered)
    assert "finds 1 gradients" in broken(schedule=replace(plan.schedule, gradient_slots=1))

    def with_chunk(chunk: Chunk) -> tuple[Chunk, ...]:
        return (chunk, *plan.chunks[1:])

    first = plan.chunks[0]
    (slot,) = first.masters
    foreign = replace(first, masters=(replace(slot, parameter=3),))
    assert "other masters than its content's" in broken(chunks=with_chunk(foreign))
    crooked = replace(first, masters=(replace(slot, offset=8),))
    assert "has a master at byte 8" in broken(chunks=with_chunk(crooked))
    moved = replace(first, home=Home.DEVICE)
    assert "fetches masters, but its home is the device" in broken(chunks=with_chunk(moved))


def test_staging_counts_on_the_device() -> None:
    step, states = _step(4)
    kept = next(
        k for k in _ways(step, states, 4 * STATES + 2 * UNIT, "backward") if k.gradient_slots == 2
    )
    plan = _plan(step, kept, None)
    assert plan.staging_bytes == MASTER
    live = max(m.live_bytes for m in plan.moments)
    assert plan.peak_device_bytes == plan.schedule.arena_bytes + MASTER + live
    with pytest.raises(VerificationError, match="of a budget of"):
        verify(replace(plan, budget_bytes=plan.peak_device_bytes - 1))
    verify(replace(plan, budget_bytes=plan.peak_device_bytes))


def test_moments_know_nothing_of_it() -> None:
    """Fetching masters changes what is copied, not where compute copies lie."""
    step, states = _step(4)
    moments: tuple[Moment, ...] = step[1]
    (kept,) = _ways(step, states, 4 * (STATES + UNIT))
    assert _copies(kept) == "----"
    slim = schedule(kept.chunks, moments, capacity_bytes=3 * UNIT)
    assert slim == schedule(step[0], moments, capacity_bytes=3 * UNIT)
