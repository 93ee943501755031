"""Training through a paged plan is training: bit for bit."""

from __future__ import annotations

import pytest

from tests.training import GPT, assert_trains_like_eager, steps


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_twenty_steps_equal_eager(prefetch: int | None) -> None:
    assert_trains_like_eager(GPT, steps(20), arena="64KiB", prefetch=prefetch)
