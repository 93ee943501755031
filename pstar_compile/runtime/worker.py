"""A thread that runs jobs in order: the CPU's copy stream, and the host side of a GPU's."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable


class Job:
    """A job given to a :class:`Worker`; also the event of its completion."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the job on the worker's thread."""
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except BaseException as error:
            self._error = error
        finally:
            # Whoever waits for the job may want the memory that it held.
            del function
            self._done.set()

    def reached(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._done.is_set()

    def wait_host(self) -> None:
        """Block until the job has ended; raise its error if it failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job


class Worker:
    """One daemon thread and its queue. The thread starts with the first job and ends with the
    worker, so a process never waits for it, and a fork before the first step copies no thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None

    def submit(self, function: Callable[[], None]) -> Job:
        """Queue ``function``; returns its completion event."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        job = self._last = Job(function)
        self._jobs.put(job)
        return job

    @property
    def idle(self) -> bool:
        """Whether every job given so far has ended."""
        return self._last is None or self._last.reached()

    def drain(self) -> None:
        """Block until every job given so far has ended, whatever its outcome."""
        if self._last is not None:
            self._last._done.wait()

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None
