from __future__ import annotations

import pytest

from passes.placement import place
from passes.plan import Home


@pytest.mark.parametrize(
    ("budget", "arena", "home"),
    [
        (None, None, Home.DEVICE),
        (150, None, Home.DEVICE),
        (149, None, Home.HOST),
        (None, 40, Home.DEVICE),
        (None, 39, Home.HOST),
        (150, 40, Home.DEVICE),
        (150, 39, Home.HOST),
        (149, 40, Home.HOST),
    ],
)
def test_states_live_on_the_device_exactly_when_they_fit(
    budget: int | None, arena: int | None, home: Home
) -> None:
    found = place(
        state_bytes=100, resident_bytes=40, live_bytes=50, budget_bytes=budget, arena_limit=arena
    )
    assert found is home
