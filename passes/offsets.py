"""Choose where in the arena a chunk's copy or gradient goes.

In: the blocks that lie in the arena, the bytes that a new block needs, and for each block what it
would cost to push it out. Out: an offset, and the blocks that must leave for it. Everything
starts at a multiple of :data:`~passes.plan.ALIGNMENT`. Nothing is moved and nothing is decided
about time: that is ``schedule``.

Before, a place of 2 is wanted (``.`` free, later next use = cheaper to push out)::

    A A . B . C C          A used at 9, B used at 4, C used at 12

After (no gap of 2, so the block whose next use is furthest leaves)::

    A A . B . D D
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from passes.plan import ALIGNMENT, align

_PACKING_STEPS = 2000
"""Placements that :func:`pack` tries before it gives up: moments need few chunks at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An offset in bytes, and the keys of the blocks that must leave it first."""

    offset: int
    evict: tuple[int, ...]


class Arena:
    """The blocks in ``[0, capacity_bytes)``, by key. Blocks of zero bytes lie nowhere."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._blocks: list[tuple[int, int, int]] = []

    def insert(self, key: int, offset: int, nbytes: int) -> None:
        """Occupy ``[offset, offset + nbytes)``, which must be free."""
        if nbytes:
            insort(self._blocks, (offset, nbytes, key))

    def remove(self, key: int) -> None:
        """Free the block's bytes; no-op for a block of zero bytes."""
        self._blocks = [block for block in self._blocks if block[2] != key]

    def overlapping(self, offset: int, nbytes: int) -> tuple[int, ...]:
        """Keys of the blocks that share a byte with the range."""
        if not nbytes:
            return ()
        first = max(bisect_left(self._blocks, (offset,)) - 1, 0)
        keys = []
        for start, size, key in self._blocks[first:]:
            if start >= offset + nbytes:
                break
            if start + size > offset:
                keys.append(key)
        return tuple(keys)

    def place(
        self,
        nbytes: int,
        next_use: Callable[[int], int | None],
        preferred: int | None = None,
    ) -> Place | None:
        """Find ``nbytes``: the tightest free gap, or else what is used again furthest away.

        ``next_use`` gives the time of a block's next use, None if it must stay. ``preferred`` is
        taken when it is free, or as cheap as the best choice.
        """
        if not nbytes:
            return Place(offset=0, evict=())
        preference = None
        if preferred is not None and preferred + nbytes <= self.capacity_bytes:
            preference = Place(offset=preferred, evict=self.overlapping(preferred, nbytes))
            if not preference.evict:
                return preference
        gap = self._tightest_gap(nbytes)
        if gap is not None:
            return Place(offset=gap, evict=())
        best, soonest = self._cheapest_window(nbytes, next_use)
        if best is not None and preference is not None:
            uses = [next_use(key) for key in preference.evict]
            if all(use is not None and use >= soonest for use in uses):
                return preference
        return best

    def _edges(self) -> list[tuple[int, int]]:
        """For each block and the arena's end: the first free byte before it, and its start."""
        edges, free = [], 0
        for start, size, _ in self._blocks:
            edges.append((free, start))
            free = align(start + size)
        return [*edges, (free, self.capacity_bytes)]

    def _tightest_gap(self, nbytes: int) -> int | None:
        gaps = [(end - start, start) for start, end in self._edges() if end - start >= nbytes]
        return min(gaps)[1] if gaps else None

    def _cheapest_window(
        self, nbytes: int, next_use: Callable[[int], int | None]
    ) -> tuple[Place | None, int]:
        edges = self._edges()
        uses = [next_use(key) for _, _, key in self._blocks]
        best: tuple[int, int, int] | None = None
        choice: Place | None = None
        for first, (start, _) in enumerate(edges):
            soonest: int | None = None
            evicted = 0
            last = first
            while edges[last][1] - start < nbytes and last < len(uses):
                use = uses[last]
                if use is None:
                    break
                soonest = use if soonest is None else min(soonest, use)
                evicted += self._blocks[last][1]
                last += 1
            if soonest is None or edges[last][1] - start < nbytes:
                continue
            score = (soonest, -evicted, -start)
            if best is None or score > best:
                keys = tuple(key for _, _, key in self._blocks[first:last])
                best, choice = score, Place(offset=start, evict=keys)
        return choice, best[0] if best else 0


def extent(sizes: Iterable[int]) -> int:
    """Fewest bytes in which blocks of these sizes lie side by side, each start aligned."""
    sizes = tuple(sizes)
    slack = max((align(size) - size for size in sizes), default=0)
    return sum(map(align, sizes)) - slack


def pack(
    sizes: Sequence[int],
    fixed: Iterable[tuple[int, int]],
    capacity_bytes: int,
    *,
    from_top: bool = False,
) -> tuple[int, ...] | None:
    """Offsets for blocks that must lie in the arena together, around ``fixed`` (offset, nbytes).

    ``from_top`` fills from the arena's end: for blocks that stay long, so that what comes and
    goes keeps one contiguous range. None if no packing is found.
    """
    gaps, free = [], 0
    for start, size in sorted(item for item in fixed if item[1]):
        gaps.append((free, start))
        free = align(start + size)
    gaps.append((free, capacity_bytes))
    if from_top:
        gaps.reverse()
    order = sorted((i for i in range(len(sizes)) if sizes[i]), key=lambda i: (-sizes[i], i))
    bins: list[list[int]] = [[] for _ in gaps]
    steps = 0

    def fill(position: int) -> bool:
        nonlocal steps
        if position == len(order):
            return True
        tried = set()
        for content, (start, end) in zip(bins, gaps, strict=True):
            steps += 1
            if steps > _PACKING_STEPS:
                return False
            state = (end - start, tuple(sizes[i] for i in content))
            candidate = [*content, order[position]]
            if state in tried or extent(sizes[i] for i in candidate) > end - start:
                continue
            tried.add(state)
            content.append(order[position])
            if fill(position + 1):
                return True
            content.pop()
        return False

    if not fill(0):
        return None
    offsets = [0] * len(sizes)
    for content, (start, end) in zip(bins, gaps, strict=True):
        # The block with the most padding lies last: its padding may reach past the arena's end.
        content.sort(key=lambda i: align(sizes[i]) - sizes[i])
        if from_top:
            room = end - start - extent(sizes[i] for i in content)
            start += room // ALIGNMENT * ALIGNMENT
        for i in content:
            offsets[i] = start
            start += align(sizes[i])
    return tuple(offsets)
