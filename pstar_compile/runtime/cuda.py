"""Streams of a CUDA device: two side streams beside the current stream, ordered by events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from passes.plan import CAST_BYTES
from pstar_compile.runtime.streams import Event
from pstar_compile.runtime.worker import Job, Worker


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event()
        self._device = device
        # Set while the copy is still to be launched by the worker thread: until then the CUDA
        # event is not recorded, and waiting for it would wait for nothing.
        self.launch: Job | None = None

    def wait_host(self) -> None:
        if self.launch is not None:
            self.launch.wait_host()
        self.event.synchronize()

    def reached(self) -> bool:
        launched = self.launch is None or self.launch.reached()
        return launched and bool(self.event.query())

    def queue_on(self, stream: torch.cuda.Stream) -> None:
        if self.launch is not None:
            self.launch.wait_host()
            self.launch = None
        stream.wait_event(self.event)


def _copy_cast(destination: Tensor, source: Tensor) -> None:
    """Copy to the host in another dtype, cast piece by piece in memory of the present stream."""
    count = CAST_BYTES // destination.itemsize
    for here, there in zip(
        destination.view(-1).split(count), source.view(-1).split(count), strict=True
    ):
        here.copy_(there.to(here.dtype), non_blocking=True)


class CudaStreams:
    """See :class:`pstar_compile.runtime.streams.Streams`."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._h2d = torch.cuda.Stream(device)
        self._d2h = torch.cuda.Stream(device)
        self._launcher = Worker("pstar-h2d")
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def fetch(
        self,
        destination: Tensor,
        source: Tensor,
        after: Sequence[Event],
        prepare: Callable[[], None] | None,
        unpack: Callable[[], None] | None,
    ) -> Event:
        """Copy host bytes to the GPU. With host work to do first, a worker thread launches."""
        done = _CudaEvent(self.device)
        if prepare is None and self._launcher.idle:
            self._copy(self._h2d, [(destination, source)], after, done, unpack)
            return done

        def launch() -> None:
            if prepare is not None:
                prepare()
            with torch.cuda.device(self.device):
                self._copy(self._h2d, [(destination, source)], after, done, unpack)

        done.launch = self._launcher.submit(launch)
        return done

    def offload(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Copy GPU tensors to the host."""
        done = _CudaEvent(self.device)
        self._copy(self._d2h, pairs, after, done)
        return done

    @staticmethod
    def _copy(
        stream: torch.cuda.Stream,
        pairs: Sequence[tuple[Tensor, Tensor]],
        after: Sequence[Event],
        done: _CudaEvent,
        unpack: Callable[[], None] | None = None,
    ) -> None:
        with torch.cuda.stream(stream):
            for event in after:
                assert isinstance(event, _CudaEvent)
                event.queue_on(stream)
            for destination, source in pairs:
                if destination.dtype == source.dtype:
                    destination.copy_(source, non_blocking=True)
                else:
                    _copy_cast(destination, source)
            if unpack is not None:
                unpack()
            done.event.record(stream)

    def mark(self) -> Event:
        """The present end of the compute stream."""
        done = _CudaEvent(self.device)
        done.event.record(torch.cuda.current_stream(self.device))
        return done

    def wait(self, event: Event) -> None:
        """Make the compute stream wait; timing events around the wait tell for how long."""
        assert isinstance(event, _CudaEvent)
        stream = torch.cuda.current_stream(self.device)
        before = torch.cuda.Event(enable_timing=True)
        behind = torch.cuda.Event(enable_timing=True)
        before.record(stream)
        event.queue_on(stream)
        behind.record(stream)
        self._waits.append((before, behind))

    def start_step(self) -> None:
        """Count waiting from here."""
        self._waits = []

    def waited_seconds(self) -> float:
        """Seconds waited in this step; blocks until the last wait is over."""
        if self._waits:
            self._waits[-1][1].synchronize()
        milliseconds = sum(before.elapsed_time(behind) for before, behind in self._waits)
        return float(milliseconds) / 1000

    def synchronize(self) -> None:
        """Block until all copies are complete."""
        self._launcher.drain()
        self._h2d.synchronize()
        self._d2h.synchronize()

    def close(self) -> None:
        """End the launching thread."""
        self._launcher.close()
