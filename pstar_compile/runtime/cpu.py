"""Streams of an emulated device: compute on the calling thread, one worker thread per copy stream.

Every schedule, race and budget of a GPU run can be exercised this way without a GPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pstar_compile.runtime.streams import Event
from pstar_compile.runtime.worker import Worker


class _Reached:
    """The compute stream is the calling thread: its present end is always reached."""

    def wait_host(self) -> None:
        return None

    def reached(self) -> bool:
        return True


_REACHED = _Reached()


def _copy(destination: Tensor, source: Tensor) -> None:
    # One plain memory copy: it releases the GIL and takes no cores from the compute threads.
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)


class CpuStreams:
    """See :class:`pstar_compile.runtime.streams.Streams`."""

    pinned = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._h2d = Worker("pstar-h2d")
        self._d2h = Worker("pstar-d2h")
        self._waited = 0.0

    def fetch(
        self,
        destination: Tensor,
        source: Tensor,
        after: Sequence[Event],
        prepare: Callable[[], None] | None,
        unpack: Callable[[], None] | None,
    ) -> Event:
        """Copy host bytes into the emulated device, after ``prepare`` and before ``unpack``."""

        def job() -> None:
            for event in after:
                event.wait_host()
            if prepare is not None:
                prepare()
            _copy(destination, source)
            if unpack is not None:
                unpack()

        return self._h2d.submit(job)

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy tensors of the emulated device to the host."""

        def job() -> None:
            for event in after:
                event.wait_host()
            for destination, source in pairs:
                if destination.dtype == source.dtype:
                    _copy(destination, source)
                else:
                    with torch.no_grad():
                        destination.copy_(source)

        return self._d2h.submit(job)

    def mark(self) -> Event:
        """The present end of the compute stream: reached, since it is the caller."""
        return _REACHED

    def wait(self, event: Event) -> None:
        """Block the calling thread, which is the compute stream."""
        start = time.perf_counter()
        event.wait_host()
        self._waited += time.perf_counter() - start

    def start_step(self) -> None:
        """Count waiting from here."""
        self._waited = 0.0

    def waited_seconds(self) -> float:
        """Seconds waited in this step."""
        return self._waited

    def synchronize(self) -> None:
        """Block until all copies are complete."""
        self._h2d.drain()
        self._d2h.drain()

    def close(self) -> None:
        """End both worker threads."""
        self._h2d.close()
        self._d2h.close()
