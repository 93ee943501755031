"""Placement: the home of the chunks.

In: bytes. Out: ``device`` when the model states, resident as a whole, fit beside the non-model
peak; ``host`` otherwise. No-op: without a budget everything fits.
"""

from __future__ import annotations

from passes.plan import Home


def place(
    *,
    state_bytes: int,
    resident_bytes: int,
    live_bytes: int,
    budget_bytes: int | None,
    arena_limit: int | None,
) -> Home:
    """Choose the home of all chunks.

    Args:
        state_bytes: bytes of all masters, gradients, moments, and compute copies, if they differ
            from the masters.
        resident_bytes: the part of them that a step reads and writes: compute copies, gradients.
        live_bytes: peak of non-model data.
        budget_bytes: device memory that the step may use; None: unlimited.
        arena_limit: bytes that resident chunks may use; None: unlimited.
    """
    if budget_bytes is not None and state_bytes + live_bytes > budget_bytes:
        return Home.HOST
    if arena_limit is not None and resident_bytes > arena_limit:
        return Home.HOST
    return Home.DEVICE
