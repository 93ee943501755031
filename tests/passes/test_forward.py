"""The part of a step that runs when its backward does not."""

from __future__ import annotations

from hypothesis import given

from passes.forward import forward_alone
from passes.plan import Direction, Kind
from tests.passes.plans import RATES, UNIT, Step, palindrome, planned, random_steps


def test_a_palindrome_is_cut_in_the_middle() -> None:
    plan = planned(palindrome(4), 3 * UNIT, carry=True)
    forward = forward_alone(plan, RATES)
    assert [m.index for m in forward.moments] == [0, 1, 2, 3]
    assert forward.d2h_bytes == 0 < plan.d2h_bytes
    assert 4 * UNIT <= forward.h2d_bytes < plan.h2d_bytes
    assert 0 < forward.step_seconds < plan.step_seconds
    assert forward.carried_bytes == plan.carried_bytes > 0


def test_an_inference_step_stays_as_it_is() -> None:
    chunks, moments = palindrome(2, trained=False)
    plan = planned((chunks, moments), 2 * UNIT)
    assert forward_alone(plan, RATES) == plan


@given(random_steps())
def test_the_bytes_are_those_of_the_forwards_actions(step: Step) -> None:
    plan = planned(step, sum(c.nbytes + UNIT for c in step[0]) * 2)
    forward = forward_alone(plan, RATES)
    moments = {m.index for m in plan.moments if m.direction is Direction.FORWARD}
    fetches = [a for a in plan.actions(Kind.FETCH) if a.moment in moments]
    assert forward.h2d_bytes == sum(a.nbytes for a in fetches)
    assert [a.index for a in forward.schedule.actions] == list(range(len(forward.schedule.actions)))
    assert forward.carried_bytes <= plan.carried_bytes
