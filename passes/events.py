"""Order actions across streams: fill in ``after`` so that no two of them race.

In: actions in issue order with their offsets. Out: the same actions, numbered, each with the
fewest events it must wait for: at most one per other stream, none that is implied by what its
stream has already waited for. A no-op for actions that share no bytes across streams.

Before::

    0 compute m0 (reads [0, 256))      h2d has seen nothing of the compute stream
    1 fetch c1 -> [0, 256)
    2 wait c1

After::

    1 fetch c1 -> [0, 256) after 0     2 wait c1 after 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from passes.plan import Action, Chunk, Home, Kind, Moment, PlanError, Stream

_STREAMS = tuple(Stream)
_NEVER = -1
_SOURCE = {Kind.WAIT: Kind.FETCH, Kind.OFFLOAD: Kind.REDUCE, Kind.DISCARD: Kind.OFFLOAD}

Clock = tuple[int, ...]
"""Per stream, the last action known to be complete."""


class _Touched:
    """Per byte range of the arena: the last action of each stream that used it."""

    def __init__(self) -> None:
        self._cuts = [0]
        self._last: list[Clock] = [(_NEVER,) * len(_STREAMS)]

    def _split(self, at: int) -> int:
        index = bisect_left(self._cuts, at)
        if index == len(self._cuts) or self._cuts[index] != at:
            self._cuts.insert(index, at)
            self._last.insert(index, self._last[index - 1])
        return index

    def latest(self, start: int, end: int) -> Clock:
        """The last action of each stream that used any byte of the range."""
        first, last = self._split(start), self._split(end)
        return tuple(map(max, zip(*self._last[first:last], strict=True)))

    def read(self, start: int, end: int, stream: int, action: int) -> None:
        """Note a read; earlier readers on other streams stay visible."""
        first, last = self._split(start), self._split(end)
        for i in range(first, last):
            seen = self._last[i]
            self._last[i] = (*seen[:stream], action, *seen[stream + 1 :])

    def write(self, start: int, end: int, stream: int, action: int) -> None:
        """Note a write; whoever is ordered behind it is ordered behind all earlier users."""
        first, last = self._split(start), self._split(end)
        del self._cuts[first + 1 : last], self._last[first + 1 : last]
        self._last[first] = tuple(action if s == stream else _NEVER for s in range(len(_STREAMS)))


class _Slots:
    """Host buffers that gradients take when they leave and updates give back."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._taken = 0
        self._updates: deque[int] = deque()

    def given_back(self, update: int) -> None:
        self._updates.append(update)

    def taken(self, moment: int) -> tuple[int, ...]:
        """Take a slot: the update that gives it back, if that is still to be waited for."""
        if self._count is None:
            return ()
        if self._taken < self._count:
            self._taken += 1
            return ()
        if not self._updates:
            raise PlanError(
                f"more than {self._count} gradients wait on the host at moment {moment}",
                moment=moment,
                needed_bytes=self._count + 1,
                available_bytes=self._count,
            )
        return (self._updates.popleft(),)


def order(
    actions: Sequence[Action],
    chunks: Mapping[int, Chunk],
    moments: Mapping[int, Moment],
    *,
    gradient_slots: int | None = None,
) -> tuple[Action, ...]:
    """Number the actions and give each the events it waits for.

    ``gradient_slots`` are the host buffers in which gradients wait for their update; None: each
    has one of its own. Raises PlanError if more gradients wait for what comes later.
    """
    touched = _Touched()
    slots = _Slots(gradient_slots)
    seen: list[Clock] = [(_NEVER,) * len(_STREAMS)] * len(_STREAMS)
    done: list[Clock] = []
    resident: dict[int, tuple[int, int]] = {}
    latest: dict[tuple[Kind, int | None], int] = {}
    ordered: list[Action] = []
    for index, action in enumerate(actions):
        stream = _STREAMS.index(action.stream)
        span = None
        if action.offset is not None and action.nbytes:
            span = action.offset, action.offset + action.nbytes
        # These name their source even when it is implied: it is what they mean. What is discarded
        # before it is offloaded was offloaded by the step before.
        source = _SOURCE.get(action.kind)
        if action.kind is Kind.UPDATE_HOST:
            # It reads the gradient, and writes what fetches of the chunk read.
            sources = (latest.get((kind, action.chunk)) for kind in (Kind.FETCH, Kind.OFFLOAD))
            after: tuple[int, ...] = tuple(sorted(s for s in sources if s is not None))
        elif source is not None:
            before = latest.get((source, action.chunk))
            after = () if before is None else (before,)
            if action.kind is Kind.OFFLOAD:
                after = (*after, *slots.taken(action.moment))
        elif span and action.kind in (Kind.FETCH, Kind.REDUCE):
            after = _needed(touched.latest(*span), stream, seen[stream], done)
        else:
            after = ()
        clock = tuple(map(max, zip(seen[stream], *(done[a] for a in after), strict=True)))
        seen[stream] = (*clock[:stream], index, *clock[stream + 1 :])
        done.append(seen[stream])
        latest[action.kind, action.chunk] = index
        if action.kind is Kind.UPDATE_HOST:
            slots.given_back(index)
        ordered.append(replace(action, index=index, after=after))

        if action.kind is Kind.COMPUTE:
            for chunk in moments[action.moment].needs:
                if chunks[chunk].home is Home.HOST and chunks[chunk].nbytes:
                    touched.read(*resident[chunk], stream, index)
        elif span and action.kind is Kind.OFFLOAD:
            touched.read(*span, stream, index)
        elif span and action.kind in (Kind.FETCH, Kind.REDUCE):
            touched.write(*span, stream, index)
            if action.kind is Kind.FETCH and action.chunk is not None:
                resident[action.chunk] = span
    return tuple(ordered)


def _needed(users: Clock, stream: int, seen: Clock, done: Sequence[Clock]) -> tuple[int, ...]:
    """Of the last users on other streams, those that nothing else orders before this action."""
    pending = [s for s, user in enumerate(users) if s != stream and user > seen[s]]

    def implied(s: int) -> bool:
        return any(t != s and done[users[t]][s] >= users[s] for t in pending)

    return tuple(sorted(users[s] for s in pending if not implied(s)))
