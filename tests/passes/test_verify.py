"""Valid plans pass; every way to break one is found at every place where it can be done.

Each mutation yields all broken variants of a plan, with the problem that must be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from passes.plan import (
    ALIGNMENT,
    Action,
    Chunk,
    Direction,
    Home,
    Kind,
    Slot,
    StepPlan,
    VerificationError,
)
from passes.verify import verify
from tests.passes.broken import Broken, Mutation, changed, moved, of_kind, with_actions, without
from tests.passes.plans import UNIT, Step, a_chunk, leaving, moments_of, palindrome, planned
from tests.passes.plans import units as chunks_of_units


def _two_parameters(index: int, first: int, second: int) -> Chunk:
    chunk = a_chunk(2 * index, first)
    start = -(-first // ALIGNMENT) * ALIGNMENT
    content = (*chunk.content, Slot(parameter=2 * index + 1, offset=start, nbytes=second))
    return replace(chunk, index=index, content=content, nbytes=start + second)


def _tied() -> Step:
    """Chunk 0 is used at both ends and gets its gradient from two moments."""
    reduces = {2: [2], 3: [1, 0], 4: [0]}
    return chunks_of_units(2, 1, 1), moments_of([0, 1], [2], [2], [1], [0], reduces=reduces)


def _forward_only() -> Step:
    """The backward does not read chunk 0, which the next step needs first."""
    reduces = {3: [2], 4: [1]}
    return chunks_of_units(1, 1, 1), moments_of([0], [1], [2], [2], [1], reduces=reduces)


def _long() -> Step:
    """The gradient of chunk 0 is there while others come and go."""
    reduces = {3: [0, 2], 4: [1], 5: [0]}
    return chunks_of_units(1, 1, 1), moments_of([0], [1], [2], [2], [1], [0], reduces=reduces)


def _mixed() -> Step:
    """Two parameters a chunk, a chunk of the device, a frozen one and an empty one."""
    chunks = (
        _two_parameters(0, 300, 100),
        _two_parameters(1, 256, 500),
        replace(_two_parameters(2, 8, 8), home=Home.DEVICE),
        replace(_two_parameters(3, 700, 8), requires_grad=False),
        _two_parameters(4, 0, 0),
    )
    needs = [[0, 2], [1, 4], [3], [3], [4, 1], [2, 0]]
    return chunks, moments_of(*needs, reduces={4: [1, 4], 5: [0, 2]})


def _leaving_small() -> Step:
    """Gradients smaller than their chunks, one of them of a chunk with two moments' worth: chunk 1
    has a place in the arena, chunks 0, 2 and 3 need none. Chunk 4 is at home on the device.
    """
    chunks = (
        _two_parameters(0, 300, 100),
        _two_parameters(1, 256, 500),
        _two_parameters(2, 700, 8),
        _two_parameters(3, 8, 8),
        replace(_two_parameters(4, 8, 8), home=Home.DEVICE),
    )
    needs = [[0], [1], [2, 4], [3], [3], [2, 4], [1], [], [0]]
    reduces = {4: [3], 5: [2, 4, 1], 6: [1], 8: [0]}
    step = leaving((chunks, moments_of(*needs, reduces=reduces)), 2, 0, 8, 0, 0, 3, 2, 1, 0)
    sizes = {0: 400, 2: 708, 3: 16, 4: 16}
    return chunks, tuple(
        replace(m, direct=tuple((c, sizes[c]) for c, _ in m.direct)) for m in step[1]
    )


PLANS: dict[str, StepPlan] = {
    "palindrome": planned(palindrome(6), 3 * UNIT),
    "on demand": planned(palindrome(5), 2 * UNIT, prefetch=0),
    "carried": planned(palindrome(7), 5 * UNIT, carry=True),
    "returning": planned(_forward_only(), 2 * UNIT, carry=True),
    "tied": planned(_tied(), 4 * UNIT),
    "long": planned(_long(), 2 * UNIT),
    "mixed": planned(_mixed(), 9 * UNIT),
    "inference": planned(palindrome(4, trained=False), 2 * UNIT),
    "leaving": planned(leaving(palindrome(6), 0, 3, 0, 5, 3, 6, 4, 3, 3, 3, 4, 3), 3 * UNIT),
    "leaving, crowded": planned(leaving(palindrome(5), *[1] * 10), 3 * UNIT),
    "leaving, some": planned(
        leaving(palindrome(6), 0, 0, 0, 0, 0, 2, 1, 1, 1, 0, 2, 0, but=[1, 4]), 3 * UNIT
    ),
    "leaving, carried": planned(
        leaving(palindrome(7), *[2] * 6, 4, *[2] * 7), 5 * UNIT, carry=True
    ),
    "leaving, small": planned(_leaving_small(), 8 * UNIT),
    "leaving, backward alone": planned(
        leaving(
            (
                chunks_of_units(1, 1, 1, 1),
                moments_of([3], [2], [1], [0], reduces={0: [3], 1: [2], 2: [1], 3: [0]}),
            ),
            *(2, 1, 0, 0),
        ),
        2 * UNIT,
    ),
    "rotation": planned((chunks_of_units(1, 1, 1, 1), moments_of([0], [1], [2], [3])), 2 * UNIT),
}


@pytest.mark.parametrize("name", PLANS)
def test_valid_plans_pass(name: str) -> None:
    verify(PLANS[name])


def _placeless(plan: StepPlan, kind: Kind) -> list[Action]:
    """The reduces or offloads of gradients that leave from where they were computed."""
    return [
        a
        for a in of_kind(plan, kind)
        if a.offset is None and a.chunk is not None and plan.chunks[a.chunk].home is Home.HOST
    ]


def _most_live(plan: StepPlan) -> int:
    return max(m.live_bytes for m in plan.moments)


def _with_moment(plan: StepPlan, index: int, **changes: object) -> StepPlan:
    moments = list(plan.moments)
    moments[index] = replace(moments[index], **changes)  # type: ignore[arg-type]
    return replace(plan, moments=tuple(moments))


def _there(plan: StepPlan, index: int) -> Iterator[tuple[str, int, int]]:
    """What lies in the arena when an action is issued: its description, offset, chunk."""
    copies: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for action in plan.schedule.actions[:index]:
        if action.chunk is None or not plan.chunks[action.chunk].nbytes:
            continue
        if action.kind is Kind.FETCH:
            assert action.offset is not None
            copies[action.chunk] = action.offset
        elif action.kind is Kind.RELEASE:
            del copies[action.chunk]
        elif action.kind is Kind.REDUCE and action.offset is not None:
            gradients[action.chunk] = action.offset
        elif action.kind is Kind.OFFLOAD:
            gradients.pop(action.chunk, None)
    yield from ((f"resident chunk {c}", offset, c) for c, offset in copies.items())
    yield from ((f"the gradient of chunk {c}", offset, c) for c, offset in gradients.items())


# Residency.


def drop_a_wait(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.WAIT):
        yield without(plan, action.index), rf"reads chunk {action.chunk} without waiting for it"


def _waited_for(plan: StepPlan) -> list[Action]:
    """All fetches but those for the next step."""
    awaited = {before for action in of_kind(plan, Kind.WAIT) for before in action.after}
    return [a for a in of_kind(plan, Kind.FETCH) if a.index in awaited]


def drop_a_fetch(plan: StepPlan) -> Broken:
    for action in _waited_for(plan):
        yield without(plan, action.index), rf"reads chunk {action.chunk}, which is not resident"


def drop_a_fetch_for_the_next_step(plan: StepPlan) -> Broken:
    awaited = _waited_for(plan)
    for action in of_kind(plan, Kind.FETCH):
        if action not in awaited:
            yield (
                without(plan, action.index),
                rf"carried chunk {action.chunk} does not end where its first fetch puts it",
            )


def fetch_for_the_next_step_without_carrying(plan: StepPlan) -> Broken:
    awaited = _waited_for(plan)
    for action in of_kind(plan, Kind.FETCH):
        if action not in awaited:
            carried = tuple(c for c in plan.schedule.carried if c != action.chunk)
            yield (
                replace(plan, schedule=replace(plan.schedule, carried=carried)),
                rf"chunk {action.chunk} is fetched by action {action.index} and never read",
            )


def wait_without_a_fetch(plan: StepPlan) -> Broken:
    for action in _waited_for(plan):
        yield (
            without(plan, action.index),
            rf"\(wait chunk {action.chunk}\) waits for a chunk that is not resident",
        )


def release_twice(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.RELEASE):
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, replace(action, index=len(actions)))
        yield (
            with_actions(plan, actions),
            rf"action {action.index + 1} \(release chunk {action.chunk}\) releases a chunk that "
            "is not resident",
        )


def drop_a_release(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.RELEASE):
        yield (
            without(plan, action.index),
            rf"chunk {action.chunk} is still resident at the end"
            rf"|fetch chunk {action.chunk}\) fetches a chunk that is resident",
        )


def release_before_the_last_use(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.RELEASE):
        use = max(
            a.index
            for a in of_kind(plan, Kind.COMPUTE)
            if a.index < action.index and action.chunk in plan.moments[a.moment].needs
        )
        moment = plan.schedule.actions[use].moment
        yield (
            moved(plan, action.index, use),
            rf"moment {moment} reads chunk {action.chunk}, which is not resident",
        )


def swap_a_wait_and_its_compute(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.COMPUTE):
        before = plan.schedule.actions[action.index - 1]
        if before.kind is Kind.WAIT:
            yield (
                moved(plan, action.index, before.index),
                rf"moment {action.moment} reads chunk {before.chunk} without waiting",
            )


def swap_a_fetch_and_its_wait(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.WAIT):
        (fetch,) = action.after
        yield moved(plan, action.index, fetch), r"\(wait\) waits for action \d+, which is not be"


def wait_for_another_fetch(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.WAIT):
        (fetch,) = action.after
        for other in of_kind(plan, Kind.FETCH):
            if other.index < action.index and other.index != fetch:
                yield (
                    changed(plan, action.index, after=(other.index,)),
                    rf"action {action.index} \(wait chunk {action.chunk}\) does not wait for the "
                    rf"chunk's fetch {fetch}",
                )


def _ending(plan: StepPlan, *, released: bool) -> StepPlan:
    """The plan with one fetch more, at its end, of the first chunk of the host."""
    last = plan.moments[-1].index
    chunk = next(c for c in plan.chunks if c.home is Home.HOST and c.nbytes)
    count = len(plan.schedule.actions)
    fetch = Action(
        index=count,
        kind=Kind.FETCH,
        moment=last,
        chunk=chunk.index,
        offset=-(-plan.schedule.arena_bytes // ALIGNMENT) * ALIGNMENT,
        nbytes=chunk.nbytes,
    )
    release = Action(index=count + 1, kind=Kind.RELEASE, moment=last, chunk=chunk.index)
    actions = (*plan.schedule.actions, fetch, *((release,) if released else ()))
    assert fetch.offset is not None
    arena = fetch.offset + chunk.nbytes
    schedule = replace(plan.schedule, actions=actions, arena_bytes=arena)
    return replace(plan, schedule=schedule, budget_bytes=None, arena_limit=None)


def fetch_what_nobody_reads(plan: StepPlan) -> Broken:
    if not plan.schedule.carried:
        count = len(plan.schedule.actions)
        yield _ending(plan, released=True), r"releases a chunk that was fetched but not read"
        yield _ending(plan, released=False), rf"is fetched by action {count} and never read"


def fetch_what_is_resident(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH):
        again = replace(action, index=len(plan.schedule.actions), after=())
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, again)
        yield (
            with_actions(plan, actions),
            rf"fetch chunk {action.chunk}\) fetches a chunk that is resid",
        )


def fetch_on_top_of_something(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH):
        for what, offset, chunk in _there(plan, action.index):
            if not action.nbytes or offset + action.nbytes > plan.schedule.arena_bytes:
                continue
            own = chunk == action.chunk
            yield (
                changed(plan, action.index, offset=offset),
                r"overlaps the chunk's own gradient"
                if own
                else rf"action {action.index} \(fetch chunk {action.chunk}\) overlaps {what}",
            )


def _first(plan: StepPlan, reduce: Action) -> bool:
    """Whether it is the first contribution to its gradient."""
    return next(a for a in of_kind(plan, Kind.REDUCE) if a.chunk == reduce.chunk) is reduce


def reduce_on_top_of_something(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.REDUCE):
        if action.offset is None or not action.nbytes or not _first(plan, action):
            continue
        for what, offset, _ in _there(plan, action.index):
            if offset + action.nbytes <= plan.schedule.arena_bytes:
                yield (
                    changed(plan, action.index, offset=offset),
                    rf"action {action.index} \(reduce chunk {action.chunk}\) overlaps {what}",
                )


def reduce_to_another_place(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.REDUCE):
        if action.offset is None or not action.nbytes or _first(plan, action):
            continue
        for offset in range(0, plan.schedule.arena_bytes - action.nbytes + 1, ALIGNMENT):
            if offset != action.offset:
                yield (
                    changed(plan, action.index, offset=offset),
                    rf"action {action.index} \(reduce chunk {action.chunk}\) is not where the "
                    "gradient's earlier contributions are",
                )


# Events.


def _drop_edges(plan: StepPlan, kind: Kind, source: Kind) -> Broken:
    for action in of_kind(plan, kind):
        for before in action.after:
            if plan.schedule.actions[before].kind is source:
                after = tuple(a for a in action.after if a != before)
                access = "read" if kind is Kind.OFFLOAD else "write"
                if action.nbytes and action.offset is not None:
                    yield (
                        changed(plan, action.index, after=after),
                        rf"race: the {access} of action {action.index} \({kind} chunk "
                        rf"{action.chunk}\) is not ordered behind action {before} \({source} ",
                    )


def fetch_over_what_is_being_read(plan: StepPlan) -> Broken:
    yield from _drop_edges(plan, Kind.FETCH, Kind.COMPUTE)


def fetch_over_what_is_being_offloaded(plan: StepPlan) -> Broken:
    yield from _drop_edges(plan, Kind.FETCH, Kind.OFFLOAD)


def reduce_over_what_is_being_offloaded(plan: StepPlan) -> Broken:
    yield from _drop_edges(plan, Kind.REDUCE, Kind.OFFLOAD)


def offload_before_the_reduce_is_complete(plan: StepPlan) -> Broken:
    yield from _drop_edges(plan, Kind.OFFLOAD, Kind.REDUCE)


def wait_for_nothing(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.WAIT):
        yield changed(plan, action.index, after=()), r"does not wait for the chunk's fetch"


def wait_for_what_comes_later(plan: StepPlan) -> Broken:
    count = len(plan.schedule.actions)
    for action in of_kind(plan, Kind.FETCH, Kind.OFFLOAD):
        for later in (action.index, count - 1, count):
            yield (
                changed(plan, action.index, after=(later,)),
                rf"action {action.index} \({action.kind}\) waits for action {later}, which is not",
            )


# Gradients.


def double_an_offload(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.OFFLOAD):
        again = replace(action, index=len(plan.schedule.actions))
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, again)
        yield with_actions(plan, actions), rf"gradient of chunk {action.chunk} is offloaded 2 times"


def drop_an_offload(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.OFFLOAD):
        yield (
            without(plan, action.index),
            rf"gradient of chunk {action.chunk} is offloaded 0 times",
        )


def drop_a_reduce(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.REDUCE):
        yield (
            without(plan, action.index),
            rf"gradient of chunk {action.chunk} is reduced 0 times at moment {action.moment}",
        )


def double_a_reduce(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.REDUCE):
        actions = list(plan.schedule.actions)
        actions.insert(action.index, replace(action, index=len(actions)))
        yield (
            with_actions(plan, actions),
            rf"gradient of chunk {action.chunk} is reduced 2 times at moment {action.moment}",
        )


def reduce_before_the_compute(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.REDUCE):
        compute = next(a for a in of_kind(plan, Kind.COMPUTE) if a.moment == action.moment)
        yield (
            moved(plan, action.index, compute.index),
            rf"reduces before moment {action.moment} is computed",
        )


def reduce_what_has_no_gradient(plan: StepPlan) -> Broken:
    for moment in plan.moments:
        for chunk in moment.reduces:
            rest = tuple(c for c in moment.reduces if c != chunk)
            yield (
                _with_moment(plan, moment.index, reduces=rest),
                rf"gradient of chunk {chunk} is reduced 1 times at moment {moment.index}",
            )


def offload_before_the_last_reduce(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.OFFLOAD):
        reduces = [a for a in of_kind(plan, Kind.REDUCE) if a.chunk == action.chunk]
        if len(reduces) > 1:
            first = reduces[0]
            actions = [a for a in plan.schedule.actions if a is not action]
            early = replace(action, moment=first.moment, after=(first.index,))
            actions.insert(actions.index(first) + 1, early)
            yield (
                with_actions(plan, actions),
                rf"\(offload chunk {action.chunk}\) comes before the chunk",
            )


def offload_other_bytes(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.OFFLOAD):
        assert action.chunk is not None
        nbytes = plan.chunks[action.chunk].nbytes
        for offset in range(0, plan.schedule.arena_bytes - nbytes + 1, ALIGNMENT):
            if offset != action.offset:
                yield (
                    changed(plan, action.index, offset=offset, nbytes=nbytes),
                    rf"action {action.index} \(offload chunk {action.chunk}\) offloads bytes that "
                    "hold no gradient of it",
                )


# Gradients that leave directly.


def _held(plan: StepPlan) -> Iterator[tuple[int, dict[int, int]]]:
    """Each moment with the gradients that are held while it computes, and their bytes."""
    held: dict[int, int] = {}
    for computed in (False, True):
        for action in plan.schedule.actions:
            if action.kind is Kind.COMPUTE and computed:
                yield action.moment, dict(held)
            elif action.kind is Kind.DISCARD and action.chunk is not None:
                held.pop(action.chunk, None)
            elif action in _placeless(plan, Kind.OFFLOAD) and action.chunk is not None:
                held[action.chunk] = action.nbytes


def drop_a_discard(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.DISCARD):
        yield (
            without(plan, action.index),
            rf"\(offload chunk {action.chunk}\) comes while the chunk's earlier gradient is still",
        )


def discard_before_the_offload(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.DISCARD):
        for before in action.after:
            yield (
                moved(plan, action.index, before),
                r"\(discard\) waits for action \d+, which is not before it",
            )


def discard_in_the_step_after(plan: StepPlan) -> Broken:
    """A discard right before the offload is of the step before: the gradient is always held."""
    full = [str(m.index) for m in plan.moments if m.live_bytes == _most_live(plan)]
    for action in of_kind(plan, Kind.DISCARD):
        for before in action.after:
            if plan.schedule.actions[before].nbytes:
                yield (
                    moved(changed(plan, action.index, after=()), action.index, before),
                    rf"moment ({'|'.join(full)}) holds \d+ bytes of gradients beside",
                )


def discard_without_waiting(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.DISCARD):
        if action.after:
            wanted = (
                rf"action {action.index} \(discard chunk {action.chunk}\) does not wait for the"
            )
            yield changed(plan, action.index, after=()), wanted
            for other in of_kind(plan, Kind.OFFLOAD):
                if other.index < action.index and other.index not in action.after:
                    yield changed(plan, action.index, after=(other.index,)), wanted


def discard_twice(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.DISCARD):
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, replace(action, index=len(actions)))
        yield (
            with_actions(plan, actions),
            rf"action {action.index + 1} \(discard chunk {action.chunk}\) discards a gradient that "
            "is not held",
        )


def discard_what_has_a_place(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.OFFLOAD):
        if action.offset is not None:
            actions = list(plan.schedule.actions)
            discard = replace(
                action,
                index=len(actions),
                kind=Kind.DISCARD,
                offset=None,
                nbytes=0,
                after=(action.index,),
            )
            actions.insert(action.index + 1, discard)
            yield (
                with_actions(plan, actions),
                rf"action {action.index + 1} \(discard chunk {action.chunk}\) discards a gradient "
                "that is not held",
            )


def offload_without_a_reduce(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.REDUCE):
        yield (
            without(plan, action.index),
            rf"\(offload chunk {action.chunk}\) does not wait for a reduce that left the gradient",
        )


def offload_directly_behind_something_else(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.OFFLOAD):
        wanted = (
            rf"action {action.index} \(offload chunk {action.chunk}\) does not wait for a reduce "
            "that left the gradient"
        )
        yield changed(plan, action.index, after=()), wanted
        for other in of_kind(plan, Kind.REDUCE, Kind.COMPUTE):
            if other.index < action.index and other.index not in action.after:
                yield changed(plan, action.index, after=(other.index,)), wanted


def offload_directly_before_the_reduce(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.OFFLOAD):
        (reduce,) = action.after
        yield (
            moved(plan, action.index, reduce),
            r"\(offload\) waits for action \d+, which is not before it",
        )


def reduce_other_bytes_directly(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.REDUCE):
        for nbytes in (action.nbytes - 1, action.nbytes + 1):
            yield (
                changed(plan, action.index, nbytes=nbytes),
                rf"action {action.index} \(reduce chunk {action.chunk}\) has {nbytes} bytes of a "
                rf"gradient of {action.nbytes}",
            )


def offload_other_bytes_directly(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.OFFLOAD):
        for nbytes in (action.nbytes - 1, action.nbytes + 1):
            yield (
                changed(plan, action.index, nbytes=nbytes),
                rf"action {action.index} \(offload chunk {action.chunk}\) does not move the whole",
            )


def reduce_directly_what_may_not_leave(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.REDUCE):
        rest = tuple(d for d in plan.moments[action.moment].direct if d[0] != action.chunk)
        yield (
            _with_moment(plan, action.moment, direct=rest),
            rf"action {action.index} \(reduce chunk {action.chunk}\) has no place, but moment "
            rf"{action.moment} is not all of its gradient",
        )


def reduce_directly_a_part(plan: StepPlan) -> Broken:
    """Another moment contributes to the gradient as well, before or after."""
    for action in _placeless(plan, Kind.REDUCE):
        for moment in plan.moments:
            if moment.index != action.moment:
                yield (
                    _with_moment(plan, moment.index, reduces=(*moment.reduces, action.chunk)),
                    rf"action {action.index} \(reduce chunk {action.chunk}\) has no place, but "
                    rf"moment {action.moment} is not all of its gradient",
                )


def hold_beside_too_much(plan: StepPlan) -> Broken:
    """One byte more of other data than there is room for beside what is held."""
    most = _most_live(plan)
    for moment, held in _held(plan):
        total = sum(held.values())
        if total:
            live = most - total + 1
            yield (
                _with_moment(plan, moment, live_bytes=live),
                rf"moment {moment} holds {total} bytes of gradients beside {live} bytes of "
                rf"non-model data, over the step's {most}",
            )


def hold_for_longer(plan: StepPlan) -> Broken:
    """A late discard moved behind the first compute beside which there is no room for it."""
    held = dict(_held(plan))
    for action in of_kind(plan, Kind.DISCARD):
        if action.after:
            continue
        size = next(a.nbytes for a in of_kind(plan, Kind.OFFLOAD) if a.chunk == action.chunk)
        for compute in of_kind(plan, Kind.COMPUTE):
            moment = plan.moments[compute.moment]
            room = _most_live(plan) - moment.live_bytes - sum(held[moment.index].values())
            if compute.index > action.index and room < size:
                yield (
                    moved(plan, action.index, compute.index + 1),
                    rf"moment {moment.index} holds \d+ bytes of gradients beside",
                )
                break


def offload_again_while_it_is_held(plan: StepPlan) -> Broken:
    for action in _placeless(plan, Kind.OFFLOAD):
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, replace(action, index=len(actions)))
        yield (
            with_actions(plan, actions),
            rf"action {action.index + 1} \(offload chunk {action.chunk}\) comes while the chunk's "
            "earlier gradient is still held",
        )


# Bytes.


def unaligned_offset(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
        if action.offset is not None:
            at = action.offset + 8
            yield (
                changed(plan, action.index, offset=at),
                rf"action {action.index} .*is at byte {at}, not a multiple of {ALIGNMENT}",
            )


def offset_outside_the_arena(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
        if action.offset is not None and action.nbytes:
            for offset in (-ALIGNMENT, 100 * ALIGNMENT):
                yield (
                    changed(plan, action.index, offset=offset),
                    rf"action {action.index} .*ends at byte {offset + action.nbytes} of an arena",
                )


def no_offset(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
        if action.offset is None:
            continue
        what = rf"action {action.index} \({action.kind} chunk {action.chunk}\)"
        problem = rf"{what} has no place in the arena"
        if action.kind is Kind.OFFLOAD:
            problem = rf"{what} does not wait for a reduce that left the gradient where it is"
        elif action.kind is Kind.REDUCE and action.chunk in dict(
            plan.moments[action.moment].direct
        ):
            problem = (
                rf"\(offload chunk {action.chunk}\) offloads bytes that hold no gradient of it"
            )
        elif action.kind is Kind.REDUCE:
            problem = rf"{what} has no place, but moment {action.moment} is not all of its gradient"
        yield changed(plan, action.index, offset=None), problem


def shrink_the_arena(plan: StepPlan) -> Broken:
    arena = plan.schedule.arena_bytes
    schedule = replace(plan.schedule, arena_bytes=arena - 1)
    yield replace(plan, schedule=schedule), rf"ends at byte {arena} of an arena of {arena - 1}"


def wrong_nbytes(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.FETCH, Kind.REDUCE, Kind.OFFLOAD):
        if action.nbytes and action.offset is not None:
            yield (
                changed(plan, action.index, nbytes=action.nbytes - 1),
                rf"action {action.index} .*moves {action.nbytes - 1} bytes of {action.nbytes}",
            )


def live_bytes_above_the_budget(plan: StepPlan) -> Broken:
    for moment in plan.moments:
        budget = plan.budget_bytes
        assert budget is not None
        yield (
            _with_moment(plan, moment.index, live_bytes=_most_live(plan) + 1),
            rf"moment {moment.index} uses {budget + 1} bytes of a budget of {budget}",
        )


def reserve_above_the_budget(plan: StepPlan) -> Broken:
    yield (
        replace(plan, reserved_bytes=plan.reserved_bytes + 1),
        r"moment \d+ uses \d+ bytes of a bud",
    )


def arena_above_its_limit(plan: StepPlan) -> Broken:
    arena = plan.schedule.arena_bytes
    yield (
        replace(plan, arena_limit=arena - 1),
        rf"arena of {arena} bytes is larger than its limit of {arena - 1}",
    )


# Order.


def compute_twice(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.COMPUTE):
        actions = list(plan.schedule.actions)
        actions.insert(action.index + 1, replace(action, index=len(actions)))
        yield (
            with_actions(plan, actions),
            rf"moments are computed as .*\b{action.moment}, {action.moment}",
        )


def drop_a_compute(plan: StepPlan) -> Broken:
    for action in of_kind(plan, Kind.COMPUTE):
        yield without(plan, action.index), r"moments are computed as .*, not each once in order"


def compute_in_another_order(plan: StepPlan) -> Broken:
    computes = of_kind(plan, Kind.COMPUTE)
    for one, next_one in pairwise(computes):
        swapped = changed(plan, one.index, moment=next_one.moment)
        yield (
            changed(swapped, next_one.index, moment=one.moment),
            rf"moments are computed as .*\b{next_one.moment}, {one.moment}\b",
        )


def issue_at_an_earlier_moment(plan: StepPlan) -> Broken:
    for action in plan.schedule.actions:
        if action.moment > 0 and action.index:
            before = plan.schedule.actions[action.index - 1].moment
            if before > 0:
                yield (
                    changed(plan, action.index, moment=before - 1),
                    rf"action {action.index} \({action.kind}\) is issued at moment {before - 1}, "
                    rf"after moment {before}",
                )


def issue_at_no_moment(plan: StepPlan) -> Broken:
    count = len(plan.moments)
    for action in plan.schedule.actions:
        yield (
            changed(plan, action.index, moment=count),
            rf"action {action.index} \({action.kind}\) names moment {count}, which does not exist",
        )


def moment_out_of_order(plan: StepPlan) -> Broken:
    for moment in plan.moments[1:]:
        moments = list(plan.moments)
        moments[moment.index] = plan.moments[moment.index - 1]
        yield (
            replace(plan, moments=tuple(moments)),
            rf"moment at position {moment.index} has index {moment.index - 1}",
        )


def forward_behind_backward(plan: StepPlan) -> Broken:
    for moment in plan.moments[1:]:
        if moment.direction is Direction.FORWARD:
            moments = list(plan.moments)
            moments[0] = replace(moments[0], direction=Direction.BACKWARD)
            yield (
                replace(plan, moments=tuple(moments)),
                rf"forward moment {moment.index} comes after a backward moment",
            )


def wrong_index(plan: StepPlan) -> Broken:
    for action in plan.schedule.actions:
        yield (
            changed(plan, action.index, index=action.index + 1),
            rf"action {action.index} \({action.kind}\) has index {action.index + 1}",
        )


def name_a_chunk_that_does_not_exist(plan: StepPlan) -> Broken:
    count = len(plan.chunks)
    for action in plan.schedule.actions:
        if action.chunk is not None:
            for chunk in (None, -1, count):
                yield (
                    changed(plan, action.index, chunk=chunk),
                    rf"action {action.index} \({action.kind}\) names chunk {chunk}, which does not",
                )
    moments = list(plan.moments)
    moments[0] = replace(moments[0], needs=(count,))
    yield replace(plan, moments=tuple(moments)), rf"moment 0 names chunk {count}, which does not ex"


# What ends the step.


def claim_as_carried(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        if chunk.index not in plan.schedule.carried:
            carried = (*plan.schedule.carried, chunk.index)
            yield (
                replace(plan, schedule=replace(plan.schedule, carried=carried)),
                rf"carried chunk {chunk.index} does not end where its first fetch puts it",
            )


def leave_without_carrying(plan: StepPlan) -> Broken:
    for chunk in plan.schedule.carried:
        carried = tuple(c for c in plan.schedule.carried if c != chunk)
        yield (
            replace(plan, schedule=replace(plan.schedule, carried=carried)),
            rf"chunk {chunk} is still resident at the end of the step",
        )


def carry_to_another_place(plan: StepPlan) -> Broken:
    for chunk in plan.schedule.carried:
        fetches = [a for a in of_kind(plan, Kind.FETCH) if a.chunk == chunk]
        if len(fetches) > 1:
            moved = changed(plan, fetches[0].index, offset=plan.schedule.arena_bytes)
            arena = plan.schedule.arena_bytes + fetches[0].nbytes
            yield (
                replace(
                    moved,
                    schedule=replace(moved.schedule, arena_bytes=arena),
                    budget_bytes=None,
                    arena_limit=None,
                ),
                rf"carried chunk {chunk} does not end where its first fetch puts it",
            )


def carry_where_others_lie_first(plan: StepPlan) -> Broken:
    """Carries what the last action fetched, though its place is used before by others."""
    last = plan.schedule.actions[-1]
    if last.kind is not Kind.RELEASE or plan.schedule.carried:
        return
    fetches = [a for a in of_kind(plan, Kind.FETCH) if a.chunk == last.chunk]
    users = [
        a
        for a in of_kind(plan, Kind.FETCH, Kind.REDUCE)
        if a.index < fetches[0].index and a.offset == fetches[0].offset and a.nbytes
    ]
    if users and len(fetches) == 1:
        kept = without(plan, last.index)
        yield (
            replace(kept, schedule=replace(kept.schedule, carried=(last.chunk,))),
            rf"action {users[0].index} .*overlaps carried chunk {last.chunk}",
        )


# Layout.


def _with_chunk(plan: StepPlan, chunk: Chunk) -> StepPlan:
    chunks = list(plan.chunks)
    chunks[chunk.index] = chunk
    return replace(plan, chunks=tuple(chunks))


def _with_slot(plan: StepPlan, chunk: Chunk, position: int, **changes: int) -> StepPlan:
    content = list(chunk.content)
    content[position] = replace(content[position], **changes)
    return _with_chunk(plan, replace(chunk, content=tuple(content)))


def parameter_in_two_chunks(plan: StepPlan) -> Broken:
    name = plan.parameters[plan.chunks[0].content[0].parameter].name
    for chunk in plan.chunks[1:]:
        yield (
            _with_slot(plan, chunk, 0, parameter=plan.chunks[0].content[0].parameter),
            rf"parameter '{name}' in chunk {chunk.index} is also in chunk 0",
        )


def parameter_that_does_not_exist(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        for number in (-1, len(plan.parameters)):
            yield (
                _with_slot(plan, chunk, 0, parameter=number),
                rf"chunk {chunk.index} names parameter {number}, which does not exist",
            )


def overlapping_slots(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        if len(chunk.content) > 1 and chunk.content[0].nbytes:
            yield (
                _with_slot(plan, chunk, 1, offset=0),
                rf"parameter 'p{2 * chunk.index + 1}' in chunk {chunk.index} overlaps the param",
            )


def unaligned_slot(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        if len(chunk.content) > 1:
            at = chunk.content[1].offset + 4
            yield (
                _with_slot(plan, chunk, 1, offset=at),
                rf"in chunk {chunk.index} starts at byte {at}, not a multiple of {ALIGNMENT}",
            )


def wrong_slot_size(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        for position, slot in enumerate(chunk.content):
            yield (
                _with_slot(plan, chunk, position, nbytes=slot.nbytes + 1),
                rf"in chunk {chunk.index} has {slot.nbytes + 1} bytes of space for {slot.nbytes}",
            )


def wrong_chunk_size(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        more = chunk.nbytes + 1
        yield (
            _with_chunk(plan, replace(chunk, nbytes=more)),
            rf"chunk {chunk.index} has {more} bytes for {chunk.nbytes} bytes of content",
        )


def wrong_kind_of_chunk(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        where = rf"in chunk {chunk.index}"
        other = replace(chunk, dtype=torch.bfloat16)
        yield _with_chunk(plan, other), rf"{where} has another dtype than the chunk"
        if chunk.requires_grad:
            frozen = _with_chunk(plan, replace(chunk, requires_grad=False))
            yield frozen, rf"{where} requires a gradient, but the chunk does not"


def wrong_chunk_index(plan: StepPlan) -> Broken:
    for chunk in plan.chunks:
        chunks = list(plan.chunks)
        chunks[chunk.index] = replace(chunk, index=chunk.index + 1)
        yield (
            replace(plan, chunks=tuple(chunks)),
            rf"chunk at position {chunk.index} has index {chunk.index + 1}",
        )


def move_a_chunk_of_the_device(plan: StepPlan) -> Broken:
    unlimited = replace(plan, budget_bytes=None)
    for action in of_kind(plan, Kind.FETCH, Kind.OFFLOAD, Kind.WAIT, Kind.RELEASE, Kind.DISCARD):
        assert action.chunk is not None
        chunk = plan.chunks[action.chunk]
        # Nothing else of the chunk is left that could be found instead.
        others = [
            replace(a, offset=None) if a.kind is Kind.REDUCE and a.chunk == chunk.index else a
            for a in plan.schedule.actions
            if a.chunk != chunk.index or a.kind is Kind.REDUCE or a is action
        ]
        yield (
            _with_chunk(with_actions(unlimited, others), replace(chunk, home=Home.DEVICE)),
            rf"\({action.kind} chunk {chunk.index}\) moves a chunk whose home is the device",
        )


MUTATIONS: tuple[Mutation, ...] = (
    drop_a_wait,
    drop_a_fetch,
    drop_a_fetch_for_the_next_step,
    fetch_for_the_next_step_without_carrying,
    wait_without_a_fetch,
    release_twice,
    drop_a_release,
    release_before_the_last_use,
    swap_a_wait_and_its_compute,
    swap_a_fetch_and_its_wait,
    wait_for_another_fetch,
    fetch_what_nobody_reads,
    fetch_what_is_resident,
    fetch_on_top_of_something,
    reduce_on_top_of_something,
    reduce_to_another_place,
    fetch_over_what_is_being_read,
    fetch_over_what_is_being_offloaded,
    reduce_over_what_is_being_offloaded,
    offload_before_the_reduce_is_complete,
    wait_for_nothing,
    wait_for_what_comes_later,
    double_an_offload,
    drop_an_offload,
    drop_a_reduce,
    double_a_reduce,
    reduce_before_the_compute,
    reduce_what_has_no_gradient,
    offload_before_the_last_reduce,
    offload_other_bytes,
    drop_a_discard,
    discard_before_the_offload,
    discard_in_the_step_after,
    discard_without_waiting,
    discard_twice,
    discard_what_has_a_place,
    offload_without_a_reduce,
    offload_directly_behind_something_else,
    offload_directly_before_the_reduce,
    reduce_other_bytes_directly,
    offload_other_bytes_directly,
    reduce_directly_what_may_not_leave,
    reduce_directly_a_part,
    hold_beside_too_much,
    hold_for_longer,
    offload_again_while_it_is_held,
    unaligned_offset,
    offset_outside_the_arena,
    no_offset,
    shrink_the_arena,
    wrong_nbytes,
    live_bytes_above_the_budget,
    reserve_above_the_budget,
    arena_above_its_limit,
    compute_twice,
    drop_a_compute,
    compute_in_another_order,
    issue_at_an_earlier_moment,
    issue_at_no_moment,
    moment_out_of_order,
    forward_behind_backward,
    wrong_index,
    name_a_chunk_that_does_not_exist,
    claim_as_carried,
    leave_without_carrying,
    carry_to_another_place,
    carry_where_others_lie_first,
    parameter_in_two_chunks,
    parameter_that_does_not_exist,
    overlapping_slots,
    unaligned_slot,
    wrong_slot_size,
    wrong_chunk_size,
    wrong_kind_of_chunk,
    wrong_chunk_index,
    move_a_chunk_of_the_device,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_broken_plan_is_found(mutation: Mutation) -> None:
    broken = [(name, *case) for name, plan in PLANS.items() for case in mutation(plan)]
    assert broken, "no plan can be broken in this way"
    for name, plan, problem in broken:
        with pytest.raises(VerificationError) as caught:
            verify(plan)
        found = caught.value.problems
        assert any(re.search(problem, p) for p in found), f"{name}: no {problem!r} in {found}"


def test_all_problems_are_listed() -> None:
    plan = PLANS["palindrome"]
    twice = changed(changed(plan, 0, offset=8), len(plan.schedule.actions) - 1, offset=8)
    with pytest.raises(VerificationError) as caught:
        verify(twice)
    assert len(caught.value.problems) == 2
    assert str(caught.value).count("\n  - ") == 2
