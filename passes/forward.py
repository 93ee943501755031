"""Forward: the part of a step that runs when its backward does not.

In: a step plan, the machine's rates. Out: a plan of its forward's moments and actions, with their
bytes and times. A no-op for inference.
"""

from __future__ import annotations

from dataclasses import replace

from passes.plan import Direction, Kind, Rates, Schedule, StepPlan
from passes.simulate import simulate


def forward_alone(plan: StepPlan, rates: Rates) -> StepPlan:
    """The plan without its backward."""
    moments = tuple(m for m in plan.moments if m.direction is Direction.FORWARD)
    actions = tuple(a for a in plan.schedule.actions if a.moment < len(moments))
    fetched = {a.chunk for a in actions if a.kind is Kind.FETCH}
    schedule = Schedule(
        actions=actions,
        arena_bytes=plan.schedule.arena_bytes,
        carried=tuple(c for c in plan.schedule.carried if c in fetched),
    )
    timeline = simulate(plan.chunks, moments, schedule, rates)
    return replace(
        plan,
        moments=moments,
        schedule=schedule,
        step_seconds=timeline.step_seconds,
        wait_seconds=timeline.wait_seconds,
    )
