"""Decide which chunk is in the arena when, and the order of all memory nodes of the step.

In: chunks with homes, moments, the arena's capacity. Out: a :class:`~passes.plan.Schedule`. When
every chunk lives on the device, only computes and reduces are left.

A chunk is fetched as early as a place is free for it, in the order of next uses; what is resident
makes room only if it is used again later than what comes in (Belady, with static offsets). So no
fetch is ever given up before its use, and whatever is next can always be placed. A gradient takes
the place of its own chunk when nothing else reads that chunk, else a place reserved ahead.

Before (moments of a forward and a backward; room for two chunks)::

    m0: needs 0    m1: needs 1    m2: needs 1, reduces 1    m3: needs 0, reduces 0

After::

    fetch 0, fetch 1, wait 0, compute m0, wait 1, compute m1, compute m2, release 1, reduce 1,
    offload 1, compute m3, release 0, reduce 0, offload 0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.events import order
from passes.offsets import Arena, Place, extent, pack
from passes.plan import (
    ALIGNMENT,
    Action,
    Chunk,
    Direction,
    Home,
    Kind,
    Moment,
    PlanError,
    Schedule,
    align,
)

_RETRIES = 4
"""Moments for which prefetching is held back one by one before it is given up altogether."""

_ROUNDS = 8
"""Rounds in which the offsets at the step's two ends are brought to agree."""


def schedule(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    *,
    capacity_bytes: int,
    prefetch: int | None = None,
    carry: bool = False,
) -> Schedule:
    """Plan all fetches, releases and gradients of one step in ``capacity_bytes`` of arena.

    ``prefetch`` limits how many moments ahead of its use a fetch is issued (None: no limit).
    ``carry`` lets the chunks that the step needs first stay at its end, where it found them.
    Raises :class:`~passes.plan.PlanError` when a moment's chunks and gradients find no place.
    """
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch must be None or at least 0 moments, got {prefetch}")
    step = _Step.of(chunks, moments)
    worst, needed = step.worst_moment()
    if needed > capacity_bytes:
        raise _error(step, worst, needed, capacity_bytes)
    best = None
    if carry:
        # Slots of one size make a ring whose places fall free in turn, so that the kept chunks
        # come to lie where they began. Without them is the second choice.
        slot = align(max((step.nbytes(c) for c in step.uses), default=0))
        best = _carried(replace(step, slot=slot), capacity_bytes, prefetch)
        best = best or _carried(step, capacity_bytes, prefetch)
    if best is None:
        try:
            best = _place(step, capacity_bytes, prefetch, {})
        except _NoPlaceError as none:
            needed = step.needed_bytes(none.position)
            raise _error(step, none.position, needed, capacity_bytes) from None
    ordered = order(best.actions, step.chunks, {m.index: m for m in moments})
    ends = (a.offset + a.nbytes for a in ordered if a.offset is not None)
    return Schedule(actions=ordered, arena_bytes=max(ends, default=0), carried=best.carried)


def smallest_capacity(
    chunks: Sequence[Chunk], moments: Sequence[Moment], *, prefetch: int | None, carry: bool
) -> int:
    """The fewest arena bytes for which :func:`schedule` was seen to succeed.

    Nothing below the largest moment's bytes can do; where that much does not do either, because
    long-lived gradients split the arena, bisects in steps of the alignment.
    """
    step = _Step.of(chunks, moments)
    low = step.worst_moment()[1]

    def fits(capacity_bytes: int) -> bool:
        try:
            schedule(chunks, moments, capacity_bytes=capacity_bytes, prefetch=prefetch, carry=carry)
        except PlanError:
            return False
        return True

    if fits(low):
        return low
    high = low + ALIGNMENT
    while not fits(high):
        low, high = high, high + 2 * (high - low)
    while high - low > ALIGNMENT:
        middle = low + (high - low) // (2 * ALIGNMENT) * ALIGNMENT
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


class _NoPlaceError(Exception):
    """What the moment at ``position`` needs does not lie in the arena together."""

    def __init__(self, position: int) -> None:
        self.position = position


def _error(step: _Step, position: int, needed: int, capacity: int) -> PlanError:
    moment = step.moments[position]
    what = f"moment {moment.index} ({moment.direction}) needs {needed} bytes"
    if needed > capacity:
        message = (
            f"{what} of chunks and gradients in the arena at once, its capacity is {capacity}: "
            f"raise the capacity by {needed - capacity} bytes or make smaller chunks"
        )
    else:
        message = (
            f"{what} in the arena of {capacity}, but gradients that are not complete yet split "
            "the rest into ranges too short for them: raise the capacity or make smaller chunks"
        )
    return PlanError(message, moment=moment.index, needed_bytes=needed, available_bytes=capacity)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The moments by position, and where the host chunks are used and reduced."""

    chunks: Mapping[int, Chunk]
    moments: tuple[Moment, ...]
    needs: tuple[tuple[int, ...], ...]
    uses: Mapping[int, list[int]]
    first_reduce: Mapping[int, int]
    last_reduce: Mapping[int, int]
    slot: int = 0

    @classmethod
    def of(cls, chunks: Sequence[Chunk], moments: Sequence[Moment]) -> _Step:
        by_index = {chunk.index: chunk for chunk in chunks}
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
                if by_index[c].home is Home.HOST:
                    first.setdefault(c, position)
                    last[c] = position
        return cls(
            chunks=by_index,
            moments=tuple(moments),
            needs=tuple(needs),
            uses=uses,
            first_reduce=first,
            last_reduce=last,
        )

    def nbytes(self, chunk: int) -> int:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """Actions in issue order without their events, and where kept chunks begin and end."""

    actions: tuple[Action, ...]
    begins: Mapping[int, int]
    ends: Mapping[int, int]
    carried: tuple[int, ...]


def _carried(step: _Step, capacity: int, prefetch: int | None) -> _Placed | None:
    """The schedule that carries most bytes: kept chunks end where they began, in every round."""
    dropped: set[int] = set()
    begins: Mapping[int, int] = {}
    best, most = None, 0
    for _ in range(_ROUNDS):
        kept = _first_needed(step, capacity, prefetch, dropped)
        if not kept:
            break
        try:
            placed = _place(step, capacity, prefetch, {c: begins.get(c) for c in kept})
        except _NoPlaceError:
            dropped.add(kept[-1])
            continue
        nbytes = sum(step.nbytes(c) for c in placed.carried)
        if len(placed.carried) == len(placed.begins):
            if nbytes > most:
                best, most = placed, nbytes
            if len(placed.carried) == len(kept):
                break
        dropped.update(c for c in kept if c not in placed.ends or c not in placed.begins)
        if placed.ends == begins:
            dropped.update(c for c in kept if c not in placed.carried)
        begins = placed.ends
    return best


def _first_needed(
    step: _Step, capacity: int, prefetch: int | None, dropped: set[int]
) -> tuple[int, ...]:
    """As many of the first-needed chunks as leave room for what must rotate."""
    # A chunk that the backward does not read would only lie there until the step ends.
    late = next((i for i, m in enumerate(step.moments) if m.direction is Direction.BACKWARD), 0)
    candidates = sorted(
        (c for c in step.uses if c not in dropped and step.uses[c][-1] >= late),
        key=lambda c: (step.uses[c][0], c),
    )
    kept: list[int] = []
    taken = 0
    gradient = max((align(step.space(c)) for c in step.first_reduce), default=0)
    for c in candidates:
        room = gradient
        rest = [align(step.space(r)) for r in step.uses if r not in kept and r != c]
        if not gradient and rest:
            # Without a backward all other chunks stream past: two places let copies overlap.
            room = max(rest) * (1 if prefetch == 0 else 2)
        if taken + align(step.space(c)) + room > align(capacity):
            break
        kept.append(c)
        taken += align(step.space(c))
    return tuple(kept)


def _place(
    step: _Step, capacity: int, prefetch: int | None, kept: Mapping[int, int | None]
) -> _Placed:
    """Place all demands; hold back prefetching at moments where it got in the way."""
    tight: set[int] = set()
    for _ in range(_RETRIES):
        try:
            return _Planner(step, capacity, prefetch, kept, frozenset(tight), strict=False).run()
        except _NoPlaceError as none:
            if none.position in tight:
                break
            tight.add(none.position)
    every = frozenset(range(len(step.moments)))
    return _Planner(step, capacity, prefetch, kept, every, strict=True).run()


class _Planner:
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
        step: _Step,
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

    def run(self) -> _Placed:
        """Place the whole step."""
        begins = self._begin()
        for position, moment in enumerate(self.step.moments):
            self.position = position
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
        return _Placed(
            actions=tuple(self.actions),
            begins=begins,
            ends=ends,
            carried=tuple(c for c in begins if ends.get(c) == begins[c]),
        )

    def _demands(self) -> list[tuple[int, bool, int]]:
        """All demands for a place by time: position, whether it is for a gradient, chunk."""
        demands = [(p, False, c) for p, needs in enumerate(self.step.needs) for c in needs]
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
                raise _NoPlaceError(0)
            begins[chunk] = place.offset
            self.arena.insert(_copy(chunk), place.offset, nbytes)
        for chunk in sorted(begins, key=lambda c: (self.step.uses[c][0], c)):
            self.resident[chunk] = begins[chunk]
            self._act(Kind.FETCH, chunk, begins[chunk])
        return begins

    def _act(self, kind: Kind, chunk: int | None, offset: int | None = None) -> None:
        moves = chunk is not None and kind in (Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD)
        self.actions.append(
            Action(
                index=len(self.actions),
                kind=kind,
                moment=self.step.moments[self.position].index,
                chunk=chunk,
                offset=offset,
                nbytes=self.step.nbytes(chunk) if moves and chunk is not None else 0,
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
                self._lay_out(position)
                return
            for key in place.evict:
                self._release(_chunk(key))
            self._put(chunk, place.offset)

    def _lay_out(self, position: int) -> None:
        """Clear everything but gradients, and pack the moment's chunks around them."""
        needs = self.step.needs[position]
        if any(c not in self.read for c in self.resident):
            raise _NoPlaceError(position)
        for chunk in list(self.resident):
            self._release(chunk)
        fixed = [(offset, self.step.space(c)) for c, offset in self.gradient.items()]
        offsets = pack([self.step.space(c) for c in needs], fixed, self.capacity)
        if offsets is None:
            raise _NoPlaceError(position)
        for chunk, offset in zip(needs, offsets, strict=True):
            self._put(chunk, offset)

    def _reduce(self, position: int, moment: Moment) -> None:
        for chunk in moment.reduces:
            if self.step.chunks[chunk].home is Home.DEVICE:
                self._act(Kind.REDUCE, chunk)
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
            raise _NoPlaceError(position)
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
        such place is taken, for it is withheld from others for the shortest time."""
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
