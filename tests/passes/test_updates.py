"""Updates inside the backward: where they come, and that verify finds every one out of place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from passes.plan import Home, Kind, Schedule, StepPlan, VerificationError
from passes.schedule import schedule
from passes.updates import with_updates
from passes.verify import verify
from tests.passes.broken import Broken, Mutation, changed, moved, of_kind, with_actions, without
from tests.passes.plans import UNIT, Step, as_plan, moments_of, palindrome, units, written


def _planned(step: Step, capacity_bytes: int, *, slots: int | None = None) -> StepPlan:
    chunks, moments = step
    made = schedule(
        chunks,
        moments,
        capacity_bytes=capacity_bytes,
        prefetch=None,
        update=True,
        gradient_slots=slots,
    )
    return as_plan(step, made, slack=0)


def _tied() -> Step:
    """Chunk 0 gets its gradient from two moments, and is read after the first of them."""
    reduces = {2: [2], 3: [1, 0], 4: [0]}
    return units(2, 1, 1), moments_of([0, 1], [2], [2], [1], [0], reduces=reduces)


def _read_late() -> Step:
    """Chunk 1 is complete before chunk 0, and a later moment still reads it."""
    reduces = {2: [1], 3: [0]}
    return units(1, 1), moments_of([0], [1], [1], [0, 1], reduces=reduces)


def _at_home() -> Step:
    chunks, moments = palindrome(4)
    return tuple(replace(c, home=Home.DEVICE) if c.index < 2 else c for c in chunks), moments


PLANS = {
    "palindrome": _planned(palindrome(6), 3 * UNIT),
    "tied": _planned(_tied(), 4 * UNIT),
    "read late": _planned(_read_late(), 3 * UNIT),
    "at home on the device": _planned(_at_home(), 3 * UNIT),
    "two slots": _planned(palindrome(6), 3 * UNIT, slots=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_valid_plans_pass(name: str) -> None:
    verify(PLANS[name])
    assert of_kind(PLANS[name], Kind.UPDATE, Kind.UPDATE_HOST)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            _read_late(),
            ["offload 1", "compute m3", "reduce 0", "offload 0", "update_host 0"],
        ),
        (
            _at_home(),
            ["reduce 1", "update 1", "compute m7", "reduce 0", "update 0"],
        ),
    ],
    ids=["behind the last read", "behind the last reduce"],
)
def test_where_updates_come(step: Step, expected: Sequence[str]) -> None:
    chunks, moments = step
    made: Schedule = schedule(chunks, moments, capacity_bytes=4 * UNIT, prefetch=None)
    plain = [a for a in made.actions if a.kind in (Kind.COMPUTE, Kind.REDUCE, Kind.OFFLOAD)]
    found = with_updates(plain, {c.index: c for c in chunks}, moments)
    lines = [line.split(" @")[0].split(" <")[0] for line in written(found)]
    positions = [lines.index(line) for line in expected]
    assert positions == sorted(positions)
    for chunk in {c for m in moments for c in m.reduces}:
        assert sum(a.chunk == chunk for a in found if a.kind.startswith("update")) == 1


def test_the_exact_order_of_a_small_step() -> None:
    chunks, moments = palindrome(2)
    made = schedule(chunks, moments, capacity_bytes=4 * UNIT, prefetch=None, update=True)
    lines = [line.split(" @")[0].split(" <")[0] for line in written(made.actions)]
    kept = [line for line in lines if line.split()[0] in ("compute", "offload", "update_host")]
    assert kept == [
        "compute m0",
        "compute m1",
        "compute m2",
        "offload 1",
        "update_host 1",
        "compute m3",
        "offload 0",
        "update_host 0",
    ]


def drop_one(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE, Kind.UPDATE_HOST):
        yield without(plan, action.index), f"chunk {action.chunk} is updated 0 times"


def update_twice(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE, Kind.UPDATE_HOST):
        actions = list(plan.schedule.actions)
        actions.append(replace(action, index=len(actions), moment=actions[-1].moment))
        yield with_actions(plan, actions), "updates the chunk again"


def _earlier(plan: StepPlan, update: int, before: int) -> StepPlan:
    """The update right before another action; it waits only for what is before it then."""
    action = plan.schedule.actions[update]
    new = moved(plan, update, before)
    (index,) = (
        a.index for a in new.schedule.actions if (a.kind, a.chunk) == (action.kind, action.chunk)
    )
    after = new.schedule.actions[index].after
    return changed(new, index, after=tuple(i for i in after if i < index))


def update_before_the_offload(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE_HOST):
        (offload,) = (a for a in of_kind(plan, Kind.OFFLOAD) if a.chunk == action.chunk)
        yield _earlier(plan, action.index, offload.index), "comes after the chunk's update"


def update_before_the_last_read(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE, Kind.UPDATE_HOST):
        reads = [
            a for a in of_kind(plan, Kind.COMPUTE) if action.chunk in plan.moments[a.moment].needs
        ]
        if reads:
            yield (
                _earlier(plan, action.index, reads[-1].index),
                f"moment {reads[-1].moment} reads chunk {action.chunk}, which is updated before",
            )


def update_at_the_wrong_home(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE_HOST):
        yield (
            changed(plan, action.index, kind=Kind.UPDATE),
            "updates a chunk on the device whose home is the host",
        )
    for action in of_kind(plan, Kind.UPDATE):
        yield changed(plan, action.index, kind=Kind.UPDATE_HOST), "whose home is the device"


def update_what_is_frozen(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE, Kind.UPDATE_HOST):
        assert action.chunk is not None
        moments = tuple(
            replace(m, reduces=tuple(c for c in m.reduces if c != action.chunk))
            for m in plan.moments
        )
        kept = [
            a
            for a in plan.schedule.actions
            if a.chunk != action.chunk or a.kind not in (Kind.REDUCE, Kind.OFFLOAD, Kind.DISCARD)
        ]
        frozen = with_actions(replace(plan, moments=moments), kept)
        yield frozen, f"chunk {action.chunk} is updated 1 times"


def update_without_waiting(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.UPDATE_HOST):
        for kind in (Kind.FETCH, Kind.OFFLOAD):
            before = [
                a
                for a in of_kind(plan, kind)
                if a.chunk == action.chunk and a.index in action.after
            ]
            for other in before:
                after = tuple(i for i in action.after if i != other.index)
                yield (
                    changed(plan, action.index, after=after),
                    f"does not wait for the chunk's {kind} {other.index}",
                )


def offload_without_a_slot(plan: StepPlan) -> Broken:
    updates = {a.index for a in of_kind(plan, Kind.UPDATE_HOST)}
    for action in of_kind(plan, Kind.OFFLOAD):
        if updates & set(action.after):
            after = tuple(i for i in action.after if i not in updates)
            yield changed(plan, action.index, after=after), "finds 2 gradients waiting in 2 slots"


MUTATIONS: Sequence[Mutation] = (
    drop_one,
    update_twice,
    update_before_the_offload,
    update_before_the_last_read,
    update_at_the_wrong_home,
    update_what_is_frozen,
    update_without_waiting,
    offload_without_a_slot,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_broken_plan_is_found(mutation: Mutation) -> None:
    broken = [(name, *case) for name, plan in PLANS.items() for case in mutation(plan)]
    assert broken, "no plan can be broken in this way"
    for name, plan, problem in broken:
        with pytest.raises(VerificationError) as caught:
            verify(plan)
        found = caught.value.problems
        assert any(re.search(problem, p) for p in found), f"{name}: no {problem!r} in {found}"
