"""What the last step did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What one step did: a forward and its backward, or one inference call.

    What activation checkpointing repeats of the forward in the backward is part of the step.

    Attributes:
        h2d_bytes: bytes copied from the host to the device.
        d2h_bytes: bytes copied from the device to the host.
        fetches: planned fetches that were carried out.
        on_demand_fetches: fetches that the plan did not foresee.
        on_demand_bytes: their part of ``h2d_bytes``.
        carried_bytes: bytes of planned fetches that were skipped because the chunk was still
            resident and unchanged (``trust_version_counters``).
        arena_peak_bytes: the largest extent of the arena that was used.
        wait_s: seconds the compute stream waited for copies.
    """

    h2d_bytes: int
    d2h_bytes: int
    fetches: int
    on_demand_fetches: int
    on_demand_bytes: int
    carried_bytes: int
    arena_peak_bytes: int
    wait_s: float


class Counters:
    """Counts the running step."""

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        """Begin a new step at zero."""
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.fetches = 0
        self.on_demand_fetches = 0
        self.on_demand_bytes = 0
        self.carried_bytes = 0
        self.arena_peak_bytes = 0

    def on_demand(self, nbytes: int) -> None:
        """One fetch that no plan foresaw."""
        self.on_demand_fetches += 1
        self.on_demand_bytes += nbytes
        self.h2d_bytes += nbytes

    def arena(self, end: int) -> None:
        """The arena is used up to byte ``end``."""
        self.arena_peak_bytes = max(self.arena_peak_bytes, end)

    def stats(self, wait_s: float) -> Stats:
        """The counts so far."""
        return Stats(
            h2d_bytes=self.h2d_bytes,
            d2h_bytes=self.d2h_bytes,
            fetches=self.fetches,
            on_demand_fetches=self.on_demand_fetches,
            on_demand_bytes=self.on_demand_bytes,
            carried_bytes=self.carried_bytes,
            arena_peak_bytes=self.arena_peak_bytes,
            wait_s=wait_s,
        )
