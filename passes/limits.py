"""What bounds a plan, and what the user decided instead of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from passes.placement import States
from passes.plan import Chunk, Home

Update = Literal["step", "backward"]
"""When chunks are updated: by ``optimizer.step()``, or as soon as their gradient is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds a plan. Bytes; None: unlimited.

    Attributes:
        budget_bytes: device memory that the step may use.
        host_bytes: host memory that model states, compute copies and gradients may use.
        arena_limit: bytes that resident chunks may use of it.
        reserved_bytes: device memory taken by neither chunks nor non-model data of the graphs.
        states: the model states, which may share the device with the arena.
    """

    budget_bytes: int | None
    host_bytes: int | None = None
    arena_limit: int | None
    reserved_bytes: int
    states: States

    def reserved(self, chunks: Sequence[Chunk]) -> int:
        """All bytes that are neither chunks nor non-model data."""
        device = any(c.home is Home.DEVICE for c in chunks)
        return self.reserved_bytes + (self.states.others_bytes if device else 0)

    def everything_fits(self, live_bytes: int) -> bool:
        """Whether the whole model's states fit on the device beside ``live_bytes`` of other data,
        and its compute copies and gradients into the arena's limit.
        """
        taken = self.states.model_bytes + self.reserved_bytes + live_bytes
        if self.budget_bytes is not None and taken > self.budget_bytes:
            return False
        return self.arena_limit is None or self.states.resident_bytes <= self.arena_limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What the user decided instead of the plan: see the backend's options.

    ``update`` says when an optimizer that works chunk by chunk updates; None: there is none.
    """

    prefetch: int | None = None
    chunk_bytes: int | None = None
    carry: bool = False
    update: Update | None = None
