"""What a runtime needs from a device: memory, and two copy streams beside the compute stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point on a stream."""

    def wait_host(self) -> None:
        """Block the calling thread until the point is reached; raise what the stream raised."""

    def reached(self) -> bool:
        """Whether the stream is past this point, well or not."""


class Streams(Protocol):
    """Copy streams and the compute stream of one device.

    Copies on one stream run in the order in which they were given. ``after`` lists events that a
    copy waits for. Nothing here blocks the caller except where it says so.
    """

    device: torch.device
    pinned: bool

    def fetch(
        self,
        destination: Tensor,
        source: Tensor,
        after: Sequence[Event],
        prepare: Callable[[], None] | None,
        unpack: Callable[[], None] | None,
    ) -> Event:
        """Copy host bytes to the device; ``prepare`` first brings the host bytes up to date, and
        ``unpack`` then works on the copied bytes, on the same stream.
        """

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy device tensors (second) into host tensors (first), all contiguous, and cast them on
        the device where the dtypes differ.
        """

    def mark(self) -> Event:
        """The present end of the compute stream."""

    def wait(self, event: Event) -> None:
        """Make the compute stream wait for ``event``, and count how long it does."""

    def start_step(self) -> None:
        """Count the compute stream's waiting from here."""

    def waited_seconds(self) -> float:
        """Seconds the compute stream waited in this step. May block until it knows."""

    def synchronize(self) -> None:
        """Block until all copies are complete; errors of earlier copies are dropped."""

    def close(self) -> None:
        """End the streams' threads."""
