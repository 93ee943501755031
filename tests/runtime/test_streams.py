"""The emulated device: order inside a stream, events between streams, errors."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from pstar_compile.runtime.cpu import CpuStreams
from pstar_compile.runtime.worker import Worker


class Gate:
    """An event that the test opens."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def wait_host(self) -> None:
        assert self._open.wait(timeout=30)


def test_jobs_run_in_order_on_one_thread() -> None:
    worker = Worker("test")
    seen: list[tuple[int, int]] = []
    jobs = [
        worker.submit(lambda i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
        for i in range(50)
    ]
    jobs[-1].wait_host()
    assert [i for i, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen}) == 1 and worker.idle


def test_an_error_reaches_who_waits_and_later_jobs_run() -> None:
    worker = Worker("test")

    def fail() -> None:
        raise ValueError("no")

    failing, later = worker.submit(fail), worker.submit(lambda: None)
    later.wait_host()
    with pytest.raises(ValueError, match="no"):
        failing.wait_host()


def test_the_thread_ends_with_its_worker() -> None:
    worker = Worker("ends-with-its-worker")
    worker.submit(lambda: None).wait_host()
    (thread,) = [t for t in threading.enumerate() if t.name == "ends-with-its-worker"]
    del worker
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_copy_waits_for_its_events_and_its_preparation() -> None:
    streams = CpuStreams()
    source, destination = torch.zeros(8), torch.zeros(8)
    gate = Gate()
    unpacked = torch.zeros(8)
    done = streams.fetch(
        destination,
        source,
        [gate],
        lambda: source.fill_(3),  # type: ignore[arg-type, return-value]
        lambda: unpacked.copy_(destination),  # type: ignore[arg-type, return-value]
    )
    offloaded = torch.zeros(8)
    last = streams.offload([(offloaded, unpacked)], [done])
    assert float(destination.sum()) == 0.0
    gate.open()
    streams.wait(last)
    assert float(destination.sum()) == float(offloaded.sum()) == 24.0
    assert streams.waited_seconds() > 0
    streams.start_step()
    assert streams.waited_seconds() == 0
    streams.close()
