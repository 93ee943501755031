"""The moments of a step by position, and where its host chunks are used and reduced.

In: chunks and moments. Out: answers to what ``placer`` and ``schedule`` ask often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.direct import Direct, direct
from passes.offsets import extent
from passes.plan import Chunk, Home, Moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The moments by position, and where the host chunks are used and reduced.

    ``first_reduce`` and ``last_reduce`` tell of gradients that need a place in the arena.
    """

    chunks: Mapping[int, Chunk]
    moments: tuple[Moment, ...]
    needs: tuple[tuple[int, ...], ...]
    uses: Mapping[int, list[int]]
    first_reduce: Mapping[int, int]
    last_reduce: Mapping[int, int]
    direct: Direct
    slot: int = 0

    @classmethod
    def of(cls, chunks: Sequence[Chunk], moments: Sequence[Moment]) -> Step:
        """The step of these moments, which need not be numbered from 0."""
        by_index = {chunk.index: chunk for chunk in chunks}
        leaving = direct(chunks, moments)
        needs = []
        uses: dict[int, list[int]] = {}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, moment in enumerate(moments):
            host = [c for c in dict.fromkeys(moment.needs) if by_index[c].home is Home.HOST]
            needs.append(tuple(host))
            for c in host:
                uses.setdefault(c, []).append(position)
            for c in moment.reduces:
                if by_index[c].home is Home.HOST and c not in leaving.nbytes:
                    first.setdefault(c, position)
                    last[c] = position
        return cls(
            chunks=by_index,
            moments=tuple(moments),
            needs=tuple(needs),
            uses=uses,
            first_reduce=first,
            last_reduce=last,
            direct=leaving,
        )

    def nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self.chunks[chunk].nbytes

    def space(self, chunk: int) -> int:
        """Bytes of arena that a chunk is given: its own, or a whole slot if that is little more."""
        nbytes = self.nbytes(chunk)
        return self.slot if 0 < nbytes <= self.slot < 2 * nbytes else nbytes

    def next_use(self, chunk: int, position: int) -> int | None:
        """Position of the chunk's first use at or after ``position``."""
        uses = self.uses[chunk]
        at = bisect_left(uses, position)
        return uses[at] if at < len(uses) else None

    def gradients(self, position: int) -> tuple[list[int], list[int]]:
        """Gradients that are there while the moment computes, and when it has reduced."""
        live = [
            c for c, first in self.first_reduce.items() if first <= position <= self.last_reduce[c]
        ]
        return [c for c in live if self.first_reduce[c] < position], live

    def needed_bytes(self, position: int) -> int:
        """Bytes without which the moment cannot run, however the rest is arranged."""
        before, after = self.gradients(position)
        running = [self.nbytes(c) for c in (*self.needs[position], *before)]
        return max(extent(running), extent(self.nbytes(c) for c in after))

    def worst_moment(self) -> tuple[int, int]:
        """Position and bytes of the moment that needs most."""
        starts: dict[int, list[int]] = {}
        for c, first in self.first_reduce.items():
            starts.setdefault(first, []).append(c)
        worst, live = (0, 0), list[int]()
        for position, needs in enumerate(self.needs):
            running = extent(map(self.nbytes, (*needs, *live)))
            live += starts.get(position, [])
            needed = max(running, extent(map(self.nbytes, live)))
            live = [c for c in live if self.last_reduce[c] > position]
            if needed > worst[1]:
                worst = position, needed
        return worst
