"""Placer: where each chunk and gradient lies at each moment, and when it is fetched.

In: a step, the bytes of arena, the chunks to keep. Out: actions in issue order, without events. A
chunk is fetched as early as a place is free for it, in the order of next uses; what is resident
makes room only if it is used again later than what comes in (Belady, with static offsets).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from passes.offsets import Arena, Place, pack
from passes.plan import Action, Home, Kind, Moment
from passes.step import Step


class NoPlaceError(Exception):
    """What the moment at ``position`` needs does not lie in the arena together."""

    def __init__(self, position: int) -> None:
        self.position = position


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Actions in issue order without their events, and where kept chunks begin and end."""

    actions: tuple[Action, ...]
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    carried: tuple[int, ...]


class Placer:
    """Walks the moments and places what each one demands, then what later ones will.

    Args:
        step: the step.
        capacity: bytes of arena.
        prefetch: as in :func:`schedule`.
        kept: chunks that shall end the step resident, with the offset at which they begin it.
        tight: positions at which nothing is fetched ahead.
        strict: nothing is reserved ahead either, and a moment's chunks may be laid out anew.
    """

    def __init__(
        self,
        step: Step,
        capacity: int,
        prefetch: int | None,
        kept: Mapping[int, int | None],
        tight: frozenset[int],
        *,
        strict: bool,
    ) -> None:
        self.step = step
        self.capacity = capacity
        self.prefetch = prefetch
        self.kept = kept
        self.tight = tight
        self.strict = strict
        self.arena = Arena(capacity)
        self.actions: list[Action] = []
        self.resident: dict[int, int] = {}
        self.gradient: dict[int, int] = {}
        # Gradient -> the one that takes over its place.
        self.heir_of: dict[int, int] = {}
        self.waited: set[int] = set()
        self.read: set[int] = set()
        self.position = 0
        self.ahead = 0
        self.demands = self._demands()

    def run(self) -> Placed:
        """Place the whole step."""
        begins = self._begin()
        for position, moment in enumerate(self.step.moments):
            self.position = position
            for chunk in self.step.direct.discards.get(position, ()):
                self._act(Kind.DISCARD, chunk)
            self._need(position)
            for chunk in self.step.needs[position]:
                if chunk not in self.waited:
                    self._act(Kind.WAIT, chunk)
                    self.waited.add(chunk)
                self.read.add(chunk)
            self._act(Kind.COMPUTE, None)
            for chunk in [c for c in self.resident if self._over(c, position)]:
                self._release(chunk)
            self._reduce(position, moment)
            if position not in self.tight and not self.strict:
                self._fetch_ahead(position)
        ends = {c: offset for c, offset in self.resident.items() if c in self.kept}
        for chunk in [c for c in self.resident if begins.get(c) != self.resident[c]]:
            self._release(chunk)
        return Placed(
            actions=tuple(self.actions),
            begins=begins,
            ends=ends,
            carried=tuple(c for c in begins if ends.get(c) == begins[c]),
        )

    def _demands(self) -> list[tuple[int, bool, int]]:
        """All demands for a place by time: position, whether it is for a gradient, chunk."""
        demands = [(p, False, c) for c, uses in self.step.uses.items() for p in uses]
        demands += [(p, True, c) for c, p in self.step.first_reduce.items()]
        return sorted(demands)

    def _begin(self) -> dict[int, int]:
        """Fetch the kept chunks first, where they shall be at the end again."""
        if not self.step.moments:
            return {}
        begins: dict[int, int] = {}
        known = {c: o for c, o in self.kept.items() if o is not None}
        for chunk in sorted(self.kept, key=lambda c: (c not in known, self.step.uses[c][0], c)):
            nbytes = self.step.space(chunk)
            place = self.arena.place(nbytes, lambda key: None, preferred=known.get(chunk))
            if place is None:
                raise NoPlaceError(0)
            begins[chunk] = place.offset
            self.arena.insert(_copy(chunk), place.offset, nbytes)
        for chunk in sorted(begins, key=lambda c: (self.step.uses[c][0], c)):
            self.resident[chunk] = begins[chunk]
            self._act(Kind.FETCH, chunk, begins[chunk])
        return begins

    def _act(self, kind: Kind, chunk: int | None, offset: int | None = None) -> None:
        nbytes = 0
        if chunk is not None and kind in (Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
            nbytes = self.step.nbytes(chunk)
            if kind is not Kind.FETCH:
                nbytes = self.step.direct.nbytes.get(chunk, nbytes)
        self.actions.append(
            Action(
                index=len(self.actions),
                kind=kind,
                moment=self.step.moments[self.position].index,
                chunk=chunk,
                offset=offset,
                nbytes=nbytes,
            )
        )

    def _release(self, chunk: int) -> None:
        del self.resident[chunk]
        self.waited.discard(chunk)
        self.read.discard(chunk)
        self.arena.remove(_copy(chunk))
        self._act(Kind.RELEASE, chunk)

    def _over(self, chunk: int, position: int) -> bool:
        """Whether a resident chunk is of no more use after ``position``."""
        return self.step.next_use(chunk, position + 1) is None and chunk not in self.kept

    def _may_leave(self, key: int, position: int) -> int | None:
        """When a block that is there is used again, from ``position`` on; None: it must stay.

        Gradients stay, and what was fetched and not read yet, and kept chunks after their last use.
        """
        if _is_gradient(key) or _chunk(key) not in self.read:
            return None
        return self.step.next_use(_chunk(key), position)

    def _place_now(
        self, nbytes: int, preferred: int | None, position: int, stay: Collection[int]
    ) -> Place | None:
        """A place for what must be there now: kept chunks leave only if nothing else helps."""

        def leaves(key: int) -> int | None:
            return None if _chunk(key) in stay else self._may_leave(key, position)

        def last_resort(key: int) -> int | None:
            if _is_gradient(key) or _chunk(key) not in self.read or _chunk(key) in stay:
                return None
            return self.step.next_use(_chunk(key), position) or len(self.step.moments)

        place = self.arena.place(nbytes, leaves, preferred)
        return place or self.arena.place(nbytes, last_resort, preferred)

    def _put(self, chunk: int, offset: int) -> None:
        self.resident[chunk] = offset
        self.arena.insert(_copy(chunk), offset, self.step.space(chunk))
        self._act(Kind.FETCH, chunk, offset)

    def _bound(self, chunk: int, position: int) -> bool:
        """Whether the use at ``position`` is a kept chunk's last: it must end where it began."""
        return self.kept.get(chunk) is not None and self.step.next_use(chunk, position + 1) is None

    def _need(self, position: int) -> None:
        """Make the moment's chunks resident, whatever must leave for it."""
        needs = self.step.needs[position]
        missing = [c for c in needs if c not in self.resident]
        placed: list[int] = []
        for chunk in sorted(missing, key=lambda c: (-self.step.space(c), c)):
            place = None
            if self._bound(chunk, position):
                place = self._there(
                    chunk,
                    lambda key: None if _chunk(key) in needs else self._may_leave(key, position),
                )
            if place is None:
                place = self._place_now(
                    self.step.space(chunk), self.kept.get(chunk), position, needs
                )
            if place is None:
                self._take_back(placed)
                self._lay_out(position)
                return
            for key in place.evict:
                self._release(_chunk(key))
            self._put(chunk, place.offset)
            placed.append(chunk)

    def _take_back(self, chunks: Collection[int]) -> None:
        """Undo fetches of this moment that were put where others then found no room."""
        for chunk in chunks:
            del self.resident[chunk]
            self.arena.remove(_copy(chunk))
            last = max(
                i for i, a in enumerate(self.actions) if a.kind is Kind.FETCH and a.chunk == chunk
            )
            del self.actions[last]

    def _lay_out(self, position: int) -> None:
        """Clear everything but gradients and what was fetched ahead for this moment, and pack the
        moment's chunks around them.
        """
        needs = self.step.needs[position]
        for chunk in list(self.resident):
            if chunk in self.read:
                self._release(chunk)
            elif chunk not in needs:
                raise NoPlaceError(position)
        fixed = [(offset, self.step.space(c)) for c, offset in self.gradient.items()]
        fixed += [(offset, self.step.space(c)) for c, offset in self.resident.items()]
        missing = [c for c in needs if c not in self.resident]
        offsets = pack([self.step.space(c) for c in missing], fixed, self.capacity)
        if offsets is None:
            raise NoPlaceError(position)
        for chunk, offset in zip(missing, offsets, strict=True):
            self._put(chunk, offset)

    def _reduce(self, position: int, moment: Moment) -> None:
        for chunk in moment.reduces:
            if self.step.chunks[chunk].home is Home.DEVICE:
                self._act(Kind.REDUCE, chunk)
                continue
            if chunk in self.step.direct.nbytes:
                self._act(Kind.REDUCE, chunk)
                self._act(Kind.OFFLOAD, chunk)
                continue
            if chunk not in self.gradient:
                self._place_gradient(chunk, position)
            self._act(Kind.REDUCE, chunk, self.gradient[chunk])
            if self.step.last_reduce[chunk] == position:
                offset = self.gradient.pop(chunk)
                self._act(Kind.OFFLOAD, chunk, offset)
                self.arena.remove(_gradient(chunk))
                heir = self.heir_of.pop(chunk, None)
                if heir is not None:
                    self.gradient[heir] = offset
                    self.arena.insert(_gradient(heir), offset, self.step.space(heir))

    def _place_gradient(self, chunk: int, position: int) -> None:
        """A place for a gradient at its first contribution: its own chunk's, by preference."""
        nbytes = self.step.space(chunk)
        place = self._place_now(nbytes, self._last_place(chunk), position + 1, ())
        if place is None:
            raise NoPlaceError(position)
        for key in place.evict:
            self._release(_chunk(key))
        self.gradient[chunk] = place.offset
        self.arena.insert(_gradient(chunk), place.offset, nbytes)

    def _last_place(self, chunk: int) -> int | None:
        """Where the chunk's copy was, if it was released at this very moment."""
        for action in reversed(self.actions):
            if action.kind is Kind.COMPUTE:
                return None
            if action.kind is Kind.RELEASE and action.chunk == chunk:
                return next(
                    a.offset
                    for a in reversed(self.actions)
                    if a.kind is Kind.FETCH and a.chunk == chunk
                )
        return None

    def _fetch_ahead(self, position: int) -> None:
        """Serve the demands of later moments in their order, as far as there is room."""
        while self.ahead < len(self.demands) and self.demands[self.ahead][0] <= position:
            self.ahead += 1
        for use, is_gradient, chunk in self.demands[self.ahead :]:
            if self.prefetch is not None and use - position > self.prefetch:
                return
            if is_gradient:
                if not self._reserve(chunk, use, position):
                    return
                continue
            if chunk in self.resident:
                continue
            if not self._fetch_for(chunk, use, position):
                return

    def _later_than(self, use: int, position: int) -> Callable[[int], int | None]:
        """What may leave for a demand at ``use``: what is used again after it."""

        def leaves(key: int) -> int | None:
            later = self._may_leave(key, position + 1)
            return later if later is not None and later > use else None

        return leaves

    def _fetch_for(self, chunk: int, use: int, position: int) -> bool:
        leaves = self._later_than(use, position)
        if self._bound(chunk, use):
            place = self._there(chunk, leaves)
        else:
            place = self.arena.place(self.step.space(chunk), leaves, self.kept.get(chunk))
        if place is None:
            return False
        for key in place.evict:
            self._release(_chunk(key))
        self._put(chunk, place.offset)
        return True

    def _there(self, chunk: int, leaves: Callable[[int], int | None]) -> Place | None:
        """The place where a kept chunk began, if what is there may leave."""
        offset = self.kept[chunk]
        assert offset is not None
        evict = self.arena.overlapping(offset, self.step.space(chunk))
        if any(leaves(key) is None for key in evict):
            return None
        return Place(offset=offset, evict=evict)

    def _reserve(self, chunk: int, first: int, position: int) -> bool:
        """Whether a gradient due at ``first`` will find a place; reserves one if it must."""
        if chunk in self.gradient or chunk in self.heir_of.values():
            return True
        nbytes = self.step.space(chunk)
        own = self.step.uses.get(chunk, [])
        in_place = chunk in self.resident and chunk not in self.kept
        if in_place and (not own or own[-1] <= first):
            return True
        if nbytes and self._inherit(chunk, first, position):
            return True
        place = self.arena.place(nbytes, self._later_than(first, position))
        if place is None:
            return False
        for key in place.evict:
            self._release(_chunk(key))
        self.gradient[chunk] = place.offset
        self.arena.insert(_gradient(chunk), place.offset, nbytes)
        return True

    def _inherit(self, chunk: int, first: int, position: int) -> bool:
        """Let a gradient take over the place of one that is offloaded before it is due: a place
        of its own, or that of a compute copy which its own gradient is going to replace. The last
        such place is taken, for it is withheld from others for the shortest time.
        """
        sources = [c for c in self.resident if self._replaced_by_gradient(c, position)]
        sources += [*self.gradient, *self.heir_of.values()]
        sources = [
            c
            for c in sources
            if c not in self.heir_of
            and self.step.last_reduce[c] < first
            and self.step.space(c) >= self.step.space(chunk)
        ]
        if not sources:
            return False
        self.heir_of[max(sources, key=lambda c: (self.step.last_reduce[c], c))] = chunk
        return True

    def _replaced_by_gradient(self, chunk: int, position: int) -> bool:
        """Whether a chunk's gradient will take the place of its compute copy."""
        first = self.step.first_reduce.get(chunk, -1)
        return chunk not in self.kept and self.step.uses[chunk][-1] <= first and first > position


def _copy(chunk: int) -> int:
    """Key of a chunk's compute copy in the arena."""
    return 2 * chunk


def _gradient(chunk: int) -> int:
    """Key of a chunk's gradient in the arena."""
    return 2 * chunk + 1


def _chunk(key: int) -> int:
    return key // 2


def _is_gradient(key: int) -> bool:
    return key % 2 == 1
