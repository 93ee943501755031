"""Decide which chunk is in the arena when, and the order of all memory nodes of the step.

In: chunks with homes, moments, the arena's capacity. Out: a :class:`~passes.plan.Schedule`. When
every chunk lives on the device, only computes and reduces are left.

A chunk is fetched as early as a place is free for it, in the order of next uses; what is resident
makes room only if it is used again later than what comes in (Belady, with static offsets). So no
fetch is ever given up before its use, and whatever is next can always be placed. A gradient takes
the place of its own chunk when nothing else reads that chunk, else a place reserved ahead; or it
needs none (see ``direct``).

Before (moments of a forward and a backward; room for two chunks)::

    m0: needs 0    m1: needs 1    m2: needs 1, reduces 1    m3: needs 0, reduces 0

After::

    fetch 0, wait 0, compute m0, fetch 1, wait 1, compute m1, compute m2, release 1, reduce 1,
    offload 1, compute m3, release 0, reduce 0, offload 0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from passes.events import order
from passes.placer import NoPlaceError, Placed, Placer
from passes.plan import ALIGNMENT, Chunk, Direction, Moment, PlanError, Schedule, align
from passes.step import Step
from passes.updates import with_updates

_RETRIES = 4
"""Moments for which prefetching is held back one by one before it is given up altogether."""

_PARTS = 8
"""Smaller capacities that are tried when the whole does not do."""

_ROUNDS = 8
"""Rounds in which the offsets at the step's two ends are brought to agree."""


def schedule(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    *,
    capacity_bytes: int,
    prefetch: int | None = None,
    carry: bool = False,
    whole: bool = True,
    update: bool = False,
    gradient_slots: int | None = None,
) -> Schedule:
    """Plan all fetches, releases and gradients of one step in ``capacity_bytes`` of arena.

    ``prefetch`` limits how many moments ahead of its use a fetch is issued (None: no limit).
    ``carry`` lets the chunks that the step needs first stay at its end, where it found them.
    Unless it is ``whole``, other graphs run between its forward and its backward, and after it, so
    that nothing stays in the arena from one to the other.
    ``update`` runs the optimizer's step of each chunk inside the backward; ``gradient_slots`` are
    the host buffers in which gradients wait for it.
    Raises :class:`~passes.plan.PlanError` when a moment's chunks and gradients find no place.
    """
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch must be None or at least 0 moments, got {prefetch}")
    parts = [moments] if whole else _directions(moments)
    placed = [_place(Step.of(chunks, p), capacity_bytes, prefetch, carry and whole) for p in parts]
    actions = [action for part in placed for action in part.actions]
    by_index = {c.index: c for c in chunks}
    if update:
        actions = with_updates(actions, by_index, moments)
    ordered = order(actions, by_index, {m.index: m for m in moments}, gradient_slots=gradient_slots)
    ends = (a.offset + a.nbytes for a in ordered if a.offset is not None)
    return Schedule(
        actions=ordered,
        arena_bytes=max(ends, default=0),
        carried=placed[0].carried if whole else (),
        gradient_slots=gradient_slots,
    )


def _directions(moments: Sequence[Moment]) -> list[Sequence[Moment]]:
    found = [[m for m in moments if m.direction is direction] for direction in Direction]
    return [part for part in found if part]


def _place(step: Step, capacity_bytes: int, prefetch: int | None, carry: bool) -> Placed:
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
    return best or _place_somehow(step, needed, capacity_bytes, prefetch)


def _place_step(
    step: Step, capacity: int, prefetch: int | None, kept: Mapping[int, int | None]
) -> Placed:
    """Place all demands; hold back prefetching at moments where it got in the way."""
    tight: set[int] = set()
    for _ in range(_RETRIES):
        try:
            return Placer(step, capacity, prefetch, kept, frozenset(tight), strict=False).run()
        except NoPlaceError as none:
            if none.position in tight:
                break
            tight.add(none.position)
    every = frozenset(range(len(step.moments)))
    return Placer(step, capacity, prefetch, kept, every, strict=True).run()


def _place_somehow(step: Step, least: int, capacity: int, prefetch: int | None) -> Placed:
    """Place the step in the whole capacity, or in a part of it: less room leads to other places,
    and now and then to one more that fits.
    """
    failure: NoPlaceError | None = None
    for part in range(_PARTS, -1, -1):
        try:
            return _place_step(step, least + (capacity - least) * part // _PARTS, prefetch, {})
        except NoPlaceError as none:
            failure = failure or none
    assert failure is not None
    needed = step.needed_bytes(failure.position)
    raise _error(step, failure.position, needed, capacity) from None


def smallest_capacity(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    *,
    prefetch: int | None,
    carry: bool,
    whole: bool = True,
) -> int:
    """The fewest arena bytes for which :func:`schedule` was seen to succeed.

    Nothing below the largest moment's bytes can do; where that much does not do either, because
    long-lived gradients split the arena, bisects in steps of the alignment.
    """
    step = Step.of(chunks, moments)
    low = step.worst_moment()[1]

    def fits(capacity_bytes: int) -> bool:
        try:
            schedule(
                chunks,
                moments,
                capacity_bytes=capacity_bytes,
                prefetch=prefetch,
                carry=carry,
                whole=whole,
            )
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


def _error(step: Step, position: int, needed: int, capacity: int) -> PlanError:
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


def _carried(step: Step, capacity: int, prefetch: int | None) -> Placed | None:
    """The schedule that carries most bytes: kept chunks end where they began, in every round."""
    dropped: set[int] = set()
    begins: Mapping[int, int] = {}
    best, most = None, 0
    for _ in range(_ROUNDS):
        kept = _first_needed(step, capacity, prefetch, dropped)
        if not kept:
            break
        try:
            returning = _returning(step, kept)
            placed = _place_step(returning, capacity, prefetch, {c: begins.get(c) for c in kept})
        except NoPlaceError:
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


def _returning(step: Step, kept: Collection[int]) -> Step:
    """The step with a use at its end for what the next step reads and the backward does not: it
    makes room for the chunks between, and comes back before the end.
    """
    late = next((i for i, m in enumerate(step.moments) if m.direction is Direction.BACKWARD), 0)
    uses = {
        c: [*at, len(step.moments)] if c in kept and at[-1] < late else at
        for c, at in step.uses.items()
    }
    return replace(step, uses=uses)


def _first_needed(
    step: Step, capacity: int, prefetch: int | None, dropped: set[int]
) -> tuple[int, ...]:
    """As many of the first-needed chunks as leave room for what must rotate."""
    candidates = sorted(
        (c for c in step.uses if c not in dropped), key=lambda c: (step.uses[c][0], c)
    )
    inference = all(m.direction is Direction.FORWARD for m in step.moments)
    kept: list[int] = []
    taken = 0
    end = len(step.moments) - 1
    gradient = max((align(step.space(c)) for c in step.gradients(end)[1]), default=0)
    for c in candidates:
        room = gradient
        rest = [align(step.space(r)) for r in step.uses if r not in kept and r != c]
        if inference and rest:
            # All other chunks stream past: two places let copies overlap.
            room = max(rest) * (1 if prefetch == 0 else 2)
        if taken + align(step.space(c)) + room > align(capacity):
            break
        kept.append(c)
        taken += align(step.space(c))
    return tuple(kept)
