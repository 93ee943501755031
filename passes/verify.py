"""Verify: is a plan valid? Written apart from ``schedule``, and run on every plan.

In: a step plan. Out: nothing, or :class:`~passes.plan.VerificationError` with every problem found:
layout of chunks, order of moments, residency of everything that is read, bytes within arena and
budget, gradients reduced and offloaded once, and every pair of conflicting accesses to the same
bytes ordered by stream order and events (a static race check). Never changes a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from passes.plan import (
    ALIGNMENT,
    Chunk,
    Direction,
    Home,
    Kind,
    StepPlan,
    VerificationError,
)
from passes.races import races

_NONE = -1


def verify(plan: StepPlan) -> None:
    """Check every invariant of ``plan``.

    Raises:
        VerificationError: listing every problem.
    """
    problems = [
        *_layout(plan),
        *_order(plan),
        *_bytes(plan),
    ]
    # The replays assume that chunks and moments exist.
    if not problems:
        replays = (_residency, _gradients, _direct, races, _updates, _slots)
        problems = [problem for replay in replays for problem in replay(plan)]
    if problems:
        raise VerificationError(tuple(problems))


def _layout(plan: StepPlan) -> Iterable[str]:
    owner: dict[int, int] = {}
    for position, chunk in enumerate(plan.chunks):
        if chunk.index != position:
            yield f"chunk at position {position} has index {chunk.index}"
        end = 0
        for slot in chunk.content:
            if not 0 <= slot.parameter < len(plan.parameters):
                yield f"chunk {chunk.index} names parameter {slot.parameter}, which does not exist"
                continue
            parameter = plan.parameters[slot.parameter]
            where = f"parameter {parameter.name!r} in chunk {chunk.index}"
            if slot.parameter in owner:
                yield f"{where} is also in chunk {owner[slot.parameter]}"
            owner[slot.parameter] = chunk.index
            if slot.offset % ALIGNMENT:
                yield f"{where} starts at byte {slot.offset}, not a multiple of {ALIGNMENT}"
            if slot.offset < end:
                yield f"{where} overlaps the parameter before it"
            if slot.nbytes != parameter.nbytes:
                yield f"{where} has {slot.nbytes} bytes of space for {parameter.nbytes}"
            if parameter.dtype != chunk.dtype:
                yield f"{where} has another dtype than the chunk"
            # One that was frozen after the chunk was made stays in it.
            if parameter.requires_grad and not chunk.requires_grad:
                yield f"{where} requires a gradient, but the chunk does not"
            end = slot.offset + slot.nbytes
        if chunk.nbytes != end:
            yield f"chunk {chunk.index} has {chunk.nbytes} bytes for {end} bytes of content"
        yield from _masters(chunk)


def _masters(chunk: Chunk) -> Iterable[str]:
    """Masters that are fetched instead of compute copies are those of the content, apart."""
    if chunk.wide and not chunk.masters:
        yield f"chunk {chunk.index} casts its gradient, but fetches no masters"
    if not chunk.masters:
        return
    if [s.parameter for s in chunk.masters] != [s.parameter for s in chunk.content]:
        yield f"chunk {chunk.index} fetches other masters than its content's"
    if chunk.home is Home.DEVICE:
        yield f"chunk {chunk.index} fetches masters, but its home is the device"
    end = 0
    first = chunk.masters[0].nbytes, chunk.content[0].nbytes
    pairs = zip(chunk.masters, chunk.content, strict=False)
    if chunk.wide and any(m.nbytes * first[1] != s.nbytes * first[0] for m, s in pairs):
        yield f"chunk {chunk.index} casts its gradient to masters of several dtypes"
    for slot in chunk.masters:
        if slot.offset % ALIGNMENT or slot.offset < end:
            yield f"chunk {chunk.index} has a master at byte {slot.offset}, behind byte {end}"
        end = slot.offset + slot.nbytes


def _order(plan: StepPlan) -> Iterable[str]:
    actions = plan.schedule.actions
    computed: list[int] = []
    moment = 0
    backward_began = False
    for position, facts in enumerate(plan.moments):
        if facts.index != position:
            yield f"moment at position {position} has index {facts.index}"
        backward_began |= facts.direction is Direction.BACKWARD
        if backward_began and facts.direction is Direction.FORWARD:
            yield f"forward moment {position} comes after a backward moment"
        for chunk in (*facts.needs, *facts.reduces):
            if not 0 <= chunk < len(plan.chunks):
                yield f"moment {position} names chunk {chunk}, which does not exist"
    for position, action in enumerate(actions):
        what = f"action {position} ({action.kind})"
        if action.index != position:
            yield f"{what} has index {action.index}"
        if not 0 <= action.moment < len(plan.moments):
            yield f"{what} names moment {action.moment}, which does not exist"
        else:
            if action.moment < moment:
                yield f"{what} is issued at moment {action.moment}, after moment {moment}"
            moment = max(moment, action.moment)
        if action.kind is Kind.COMPUTE:
            computed.append(action.moment)
        elif action.chunk is None or not 0 <= action.chunk < len(plan.chunks):
            yield f"{what} names chunk {action.chunk}, which does not exist"
        for before in action.after:
            if not 0 <= before < position:
                yield f"{what} waits for action {before}, which is not before it"
    if computed != list(range(len(plan.moments))):
        yield f"moments are computed as {computed}, not each once in order"


def _bytes(plan: StepPlan) -> Iterable[str]:
    arena = plan.schedule.arena_bytes
    for action in plan.schedule.actions:
        if action.kind is Kind.COMPUTE:
            continue
        if action.chunk is None or not 0 <= action.chunk < len(plan.chunks):
            continue
        chunk = plan.chunks[action.chunk]
        what = f"action {action.index} ({action.kind} chunk {chunk.index})"
        if chunk.home is Home.DEVICE:
            if action.kind not in (Kind.REDUCE, Kind.UPDATE) or action.offset is not None:
                yield f"{what} moves a chunk whose home is the device"
            continue
        if action.kind is Kind.UPDATE:
            yield f"{what} updates a chunk on the device whose home is the host"
        if action.kind in (Kind.WAIT, Kind.RELEASE, Kind.DISCARD, Kind.UPDATE, Kind.UPDATE_HOST):
            continue
        if action.offset is None and action.kind in (Kind.REDUCE, Kind.OFFLOAD):
            continue
        if action.nbytes != chunk.nbytes:
            yield f"{what} moves {action.nbytes} bytes of {chunk.nbytes}"
        if action.offset is None:
            yield f"{what} has no place in the arena"
        elif action.offset % ALIGNMENT:
            yield f"{what} is at byte {action.offset}, not a multiple of {ALIGNMENT}"
        elif action.offset < 0 or action.offset + action.nbytes > arena:
            yield f"{what} ends at byte {action.offset + action.nbytes} of an arena of {arena}"
    if plan.arena_limit is not None and arena > plan.arena_limit:
        yield f"the arena of {arena} bytes is larger than its limit of {plan.arena_limit}"
    if plan.host_limit is not None and plan.peak_host_bytes > plan.host_limit:
        yield (
            f"the host keeps {plan.peak_host_bytes} bytes, and its limit is {plan.host_limit} bytes"
        )
    if plan.budget_bytes is None:
        return
    fixed = arena + plan.reserved_bytes + plan.device_state_bytes + plan.staging_bytes
    for moment in plan.moments:
        if fixed + moment.live_bytes > plan.budget_bytes:
            yield (
                f"moment {moment.index} uses {fixed + moment.live_bytes} bytes of a budget of "
                f"{plan.budget_bytes}"
            )


@dataclass(slots=True)
class _Resident:
    start: int
    end: int
    fetch: int
    waited: bool = False
    read: bool = False


def _residency(plan: StepPlan) -> Iterable[str]:
    """Replay in issue order: what is read is there, and nothing lies on top of anything."""
    resident: dict[int, _Resident] = {}
    gradients: dict[int, tuple[int, int]] = {}
    first_offset: dict[int, int | None] = {}
    last_reduce = {c: m.index for m in plan.moments for c in m.reduces}
    # What a step finds where the step before left it lies there until its first, skipped fetch.
    found: dict[int, tuple[int, int]] = {}
    for action in reversed(plan.schedule.actions):
        if action.kind is Kind.FETCH and action.chunk in plan.schedule.carried:
            assert action.chunk is not None and action.offset is not None
            found[action.chunk] = (action.offset, action.offset + action.nbytes)

    def overlap(chunk: int, start: int, end: int) -> Iterable[str]:
        for other, held in resident.items():
            if _overlaps((held.start, held.end), (start, end)):
                yield f"overlaps resident chunk {other}"
        for other, space in gradients.items():
            if other != chunk and _overlaps(space, (start, end)):
                yield f"overlaps the gradient of chunk {other}"
        for other, space in found.items():
            if _overlaps(space, (start, end)):
                yield f"overlaps carried chunk {other} before its first fetch"

    for action in plan.schedule.actions:
        what = f"action {action.index} ({action.kind} chunk {action.chunk})"
        if action.kind is Kind.COMPUTE:
            for chunk in plan.moments[action.moment].needs:
                if plan.chunks[chunk].home is Home.DEVICE:
                    continue
                if chunk not in resident:
                    yield f"moment {action.moment} reads chunk {chunk}, which is not resident"
                elif not resident[chunk].waited:
                    yield f"moment {action.moment} reads chunk {chunk} without waiting for it"
                else:
                    resident[chunk].read = True
            continue
        assert action.chunk is not None
        chunk = action.chunk
        if plan.chunks[chunk].home is Home.DEVICE:
            continue
        if action.kind is Kind.FETCH:
            assert action.offset is not None
            end = action.offset + action.nbytes
            if chunk in resident:
                yield f"{what} fetches a chunk that is resident"
            found.pop(chunk, None)
            yield from (f"{what} {o}" for o in overlap(chunk, action.offset, end))
            if chunk in gradients and _overlaps(gradients[chunk], (action.offset, end)):
                yield f"{what} overlaps the chunk's own gradient"
            resident[chunk] = _Resident(action.offset, end, action.index)
            first_offset.setdefault(chunk, action.offset)
        elif action.kind is Kind.WAIT:
            if chunk not in resident:
                yield f"{what} waits for a chunk that is not resident"
            elif resident[chunk].fetch not in action.after:
                yield f"{what} does not wait for the chunk's fetch {resident[chunk].fetch}"
            else:
                resident[chunk].waited = True
        elif action.kind is Kind.RELEASE:
            if chunk not in resident:
                yield f"{what} releases a chunk that is not resident"
            elif not resident.pop(chunk).read:
                yield f"{what} releases a chunk that was fetched but not read"
        elif action.offset is None:
            continue
        elif action.kind is Kind.REDUCE:
            space = (action.offset, action.offset + action.nbytes)
            if chunk not in gradients:
                yield from (f"{what} {o}" for o in overlap(chunk, *space))
                gradients[chunk] = space
            elif gradients[chunk] != space:
                yield f"{what} is not where the gradient's earlier contributions are"
        elif action.kind is Kind.OFFLOAD:
            space = (action.offset, action.offset + action.nbytes)
            if gradients.pop(chunk, None) != space:
                yield f"{what} offloads bytes that hold no gradient of it"
            if last_reduce.get(chunk) is None or action.moment < last_reduce[chunk]:
                yield f"{what} comes before the chunk's last reduce"
    carried = set(plan.schedule.carried)
    for chunk, left in resident.items():
        if not left.read and chunk not in carried:
            yield f"chunk {chunk} is fetched by action {left.fetch} and never read"
        if chunk not in carried:
            yield f"chunk {chunk} is still resident at the end of the step"
    for chunk in carried:
        if chunk not in resident or resident[chunk].start != first_offset[chunk]:
            yield f"carried chunk {chunk} does not end where its first fetch puts it"


def _overlaps(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _gradients(plan: StepPlan) -> Iterable[str]:
    """Each moment's gradients are reduced once, and each chunk's offloaded once."""
    reduced: dict[tuple[int, int], int] = {}
    offloaded: dict[int, int] = {}
    computed = _NONE
    for action in plan.schedule.actions:
        if action.kind is Kind.COMPUTE:
            computed = action.moment
        elif action.kind is Kind.REDUCE and action.chunk is not None:
            key = (action.moment, action.chunk)
            reduced[key] = reduced.get(key, 0) + 1
            if computed != action.moment:
                yield f"action {action.index} reduces before moment {action.moment} is computed"
        elif action.kind is Kind.OFFLOAD and action.chunk is not None:
            offloaded[action.chunk] = offloaded.get(action.chunk, 0) + 1
    wanted = {(m.index, c) for m in plan.moments for c in m.reduces}
    for moment, chunk in sorted(wanted | set(reduced)):
        times = reduced.get((moment, chunk), 0)
        if times != ((moment, chunk) in wanted):
            yield f"the gradient of chunk {chunk} is reduced {times} times at moment {moment}"
    owed = {c for _, c in wanted if plan.chunks[c].home is Home.HOST}
    for chunk in sorted(owed | set(offloaded)):
        if offloaded.get(chunk, 0) != (chunk in owed):
            yield f"the gradient of chunk {chunk} is offloaded {offloaded.get(chunk, 0)} times"


def _updates(plan: StepPlan) -> Iterable[str]:
    """If the step updates, each chunk with a gradient once, when it is needed no more."""
    updated: dict[int, int] = {}
    latest: dict[tuple[Kind, int], int] = {}
    for action in plan.schedule.actions:
        what = f"action {action.index} ({action.kind} chunk {action.chunk})"
        if action.kind is Kind.COMPUTE:
            for chunk in plan.moments[action.moment].needs:
                if chunk in updated:
                    yield f"moment {action.moment} reads chunk {chunk}, which is updated before"
            continue
        assert action.chunk is not None
        chunk = action.chunk
        if action.kind in (Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
            latest[action.kind, chunk] = action.index
            if chunk in updated:
                yield f"{what} comes after the chunk's update {updated[chunk]}"
        elif action.kind in (Kind.UPDATE, Kind.UPDATE_HOST):
            if chunk in updated:
                yield f"{what} updates the chunk again"
            updated[chunk] = action.index
            if action.kind is Kind.UPDATE_HOST:
                for kind in (Kind.FETCH, Kind.OFFLOAD):
                    before = latest.get((kind, chunk))
                    if before is not None and before not in action.after:
                        yield f"{what} does not wait for the chunk's {kind} {before}"
    trained = {c for m in plan.moments for c in m.reduces}
    for chunk in sorted(trained ^ set(updated)) if updated else ():
        yield f"chunk {chunk} is updated {int(chunk in updated)} times in a step that updates"


def _slots(plan: StepPlan) -> Iterable[str]:
    """No more gradients wait for their update on the host than there are slots for them."""
    slots = plan.schedule.gradient_slots
    if slots is None:
        return
    # Updates run one after the other, and so do offloads: what one has waited for, all later have.
    updates = [action.index for action in plan.actions(Kind.UPDATE_HOST)]
    complete = _NONE
    for number, action in enumerate(plan.actions(Kind.OFFLOAD)):
        complete = max([complete, *(i for i in action.after if i in updates)])
        if number - bisect_right(updates, complete) >= slots:
            yield (
                f"action {action.index} (offload chunk {action.chunk}) finds {slots} gradients "
                f"waiting in {slots} slots"
            )


def _direct(plan: StepPlan) -> Iterable[str]:
    """Gradients without a place leave whole from the moment that produces them, and are held, over
    the step's end where need be, in memory that the step's largest moment needs anyway.
    """
    ceiling = max((m.live_bytes for m in plan.moments), default=0)
    offloaded: dict[int, int] = {}
    reduced: dict[int, int] = {}
    held: dict[int, int] = {}
    for action in plan.schedule.actions:
        if action.kind is Kind.OFFLOAD and action.offset is None and action.chunk is not None:
            held[action.chunk] = action.nbytes
        elif action.kind is Kind.DISCARD and action.chunk is not None:
            held.pop(action.chunk, None)
    for action in plan.schedule.actions:
        what = f"action {action.index} ({action.kind} chunk {action.chunk})"
        chunk = action.chunk
        if action.kind is Kind.COMPUTE:
            moment = plan.moments[action.moment]
            if moment.live_bytes + sum(held.values()) > ceiling:
                yield (
                    f"moment {action.moment} holds {sum(held.values())} bytes of gradients beside "
                    f"{moment.live_bytes} bytes of non-model data, over the step's {ceiling}"
                )
            continue
        if chunk is None or plan.chunks[chunk].home is Home.DEVICE:
            continue
        if action.kind is Kind.DISCARD:
            if held.pop(chunk, None) is None:
                yield f"{what} discards a gradient that is not held"
            if chunk in offloaded and offloaded[chunk] not in action.after:
                yield f"{what} does not wait for the offload"
        elif action.kind is Kind.REDUCE and action.offset is None:
            reduced[chunk] = action.index
            whole = dict(plan.moments[action.moment].direct).get(chunk)
            if whole is None or sum(chunk in m.reduces for m in plan.moments) != 1:
                yield f"{what} has no place, but moment {action.moment} is not all of its gradient"
            elif whole != action.nbytes:
                yield f"{what} has {action.nbytes} bytes of a gradient of {whole}"
        elif action.kind is Kind.OFFLOAD and action.offset is None:
            if chunk not in reduced or reduced[chunk] not in action.after:
                yield f"{what} does not wait for a reduce that left the gradient where it is"
            elif plan.schedule.actions[reduced[chunk]].nbytes != action.nbytes:
                yield f"{what} does not move the whole gradient"
            if chunk in held:
                yield f"{what} comes while the chunk's earlier gradient is still held"
            held[chunk] = action.nbytes
            offloaded[chunk] = action.index
