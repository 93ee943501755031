"""Ways to change a plan's actions, for plans that ``verify`` must not accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from passes.plan import Action, Kind, StepPlan

Broken = Iterator[tuple[StepPlan, str]]
"""Broken variants of a plan, each with the problem that must be named."""

Mutation = Callable[[StepPlan], Broken]


def with_actions(plan: StepPlan, actions: Sequence[Action], **changes: object) -> StepPlan:
    """The plan with other actions; numbers and events follow the old numbers to the new places."""
    number = {action.index: position for position, action in enumerate(actions)}
    renumbered = tuple(
        replace(
            action,
            index=position,
            after=tuple(number[a] for a in action.after if a in number),
        )
        for position, action in enumerate(actions)
    )
    return replace(plan, schedule=replace(plan.schedule, actions=renumbered, **changes))


def changed(plan: StepPlan, at: int, /, **changes: object) -> StepPlan:
    """The plan with one action changed where it is."""
    actions = list(plan.schedule.actions)
    actions[at] = replace(actions[at], **changes)  # type: ignore[arg-type]
    return replace(plan, schedule=replace(plan.schedule, actions=tuple(actions)))


def without(plan: StepPlan, index: int) -> StepPlan:
    return with_actions(plan, [a for a in plan.schedule.actions if a.index != index])


def moved(plan: StepPlan, index: int, before: int) -> StepPlan:
    """The plan with an action moved to right before another."""
    actions = list(plan.schedule.actions)
    action = actions[index]
    target = actions[before]
    actions.remove(action)
    actions.insert(actions.index(target), replace(action, moment=target.moment))
    return with_actions(plan, actions)


def of_kind(plan: StepPlan, *kinds: Kind) -> list[Action]:
    return [a for a in plan.schedule.actions if a.kind in kinds]
