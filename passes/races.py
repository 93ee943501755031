"""Races: are all conflicting accesses to the arena's bytes ordered? A part of ``verify``.

In: a step plan whose chunks and moments exist. Out: a problem for each pair of accesses to the same
bytes, one of them a write, that neither stream order nor an event orders. Clock vectors tell: per
stream, the last action that is complete when an action is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from passes.plan import Action, Kind, StepPlan, Stream

_STREAMS = tuple(Stream)
_NONE = -1


class _Accesses:
    """By byte range of the arena: the last write, and the reads since, of each stream."""

    def __init__(self, arena_bytes: int) -> None:
        self._cuts = [0, max(arena_bytes, 1)]
        self._write = [(_NONE, 0)]
        self._reads: list[tuple[int, ...]] = [(_NONE,) * len(_STREAMS)]

    def ranges(self, start: int, end: int) -> range:
        return range(self._cut(start), self._cut(end))

    def _cut(self, at: int) -> int:
        index = bisect_left(self._cuts, at)
        if self._cuts[index] != at:
            self._cuts.insert(index, at)
            self._write.insert(index, self._write[index - 1])
            self._reads.insert(index, self._reads[index - 1])
        return index

    def read(self, index: int, stream: int, action: int) -> tuple[int, int]:
        reads = self._reads[index]
        self._reads[index] = (*reads[:stream], action, *reads[stream + 1 :])
        return self._write[index]

    def write(self, index: int, stream: int, action: int) -> list[tuple[int, int]]:
        earlier = [self._write[index], *((r, s) for s, r in enumerate(self._reads[index]))]
        self._write[index] = (action, stream)
        self._reads[index] = (_NONE,) * len(_STREAMS)
        return earlier


def races(plan: StepPlan) -> Iterable[str]:
    """Conflicting accesses to the same bytes are ordered by stream order and events."""
    accesses = _Accesses(plan.schedule.arena_bytes)
    # clocks[i][s]: the last action of stream s that is complete when action i is.
    clocks: list[tuple[int, ...]] = []
    latest: list[int] = [_NONE] * len(_STREAMS)
    place: dict[int, tuple[int, int]] = {}
    for action in plan.schedule.actions:
        stream = _STREAMS.index(action.stream)
        known = clocks[latest[stream]] if latest[stream] != _NONE else (_NONE,) * len(_STREAMS)
        for before in action.after:
            known = tuple(map(max, known, clocks[before]))
        clock = (*known[:stream], action.index, *known[stream + 1 :])
        clocks.append(clock)
        latest[stream] = action.index
        found: set[tuple[int, str]] = set()
        for (start, end), writes in _spans(action, plan, place):
            for index in accesses.ranges(start, end):
                if writes:
                    earlier = accesses.write(index, stream, action.index)
                else:
                    earlier = [accesses.read(index, stream, action.index)]
                for other, other_stream in earlier:
                    if other != _NONE and clock[other_stream] < other:
                        found.add((other, "write" if writes else "read"))
        for other, access in sorted(found):
            before_action = plan.schedule.actions[other]
            yield (
                f"race: the {access} of action {action.index} ({action.kind} chunk "
                f"{action.chunk}) is not ordered behind action {other} ({before_action.kind} "
                f"chunk {before_action.chunk}, moment {before_action.moment})"
            )


def _spans(
    action: Action, plan: StepPlan, place: dict[int, tuple[int, int]]
) -> Sequence[tuple[tuple[int, int], bool]]:
    """The byte ranges an action touches, and whether it writes them."""
    if action.kind is Kind.COMPUTE:
        # A chunk that was never fetched has no place; that is a problem of residency.
        needs = [plan.chunks[c] for c in plan.moments[action.moment].needs if c in place]
        return [(place[c.index], False) for c in needs if c.nbytes]
    if action.offset is None or not action.nbytes or action.chunk is None:
        return []
    span = (action.offset, action.offset + action.nbytes)
    if action.kind is Kind.FETCH:
        place[action.chunk] = span
    return [(span, action.kind is not Kind.OFFLOAD)]
