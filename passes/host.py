"""Host: what the host keeps for chunks at home there, when its memory is limited.

In: chunks with homes, the bytes of the states, the limit. Out: ways to stay within it, those that
keep more first; ``arrange`` simulates them and takes the quickest. Model states stay in any case.
What can be given up costs time instead: compute copies, because a fetch then copies the masters,
which are larger, and casts them on the device; and, where chunks are updated in the backward,
memory for all gradients at once, because an offload then waits for an earlier update.

Compute copies cost time, too, where the host updates chunks: it casts gradients before and masters
behind each update. So one more way is to let the device cast both, and more bytes move.

Before (room for the states and one of two compute copies)::

    0 states, copy    1 states, copy

After::

    0 states, copy    1 states
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from passes.limits import Choices, Limits
from passes.placement import States
from passes.plan import Chunk, Home, Moment, PlanError, Slot, align, gradient_bytes

_SLOTS = (2, 4, 8)
"""Buffers that are tried for gradients that wait for their update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What the host keeps.

    Attributes:
        chunks: the chunks; those without compute copies on the host have a layout of masters.
        gradient_slots: see ``Schedule``.
    """

    chunks: tuple[Chunk, ...]
    gradient_slots: int | None


def keep(
    chunks: Sequence[Chunk], moments: Sequence[Moment], limits: Limits, choices: Choices
) -> Iterator[Kept]:
    """Ways to stay within the host's memory.

    Args:
        chunks: the chunks with their homes.
        moments: the moments.
        limits: the bounds.
        choices: the user's.

    Raises:
        PlanError: if there is none.
    """
    everything = Kept(chunks=tuple(chunks), gradient_slots=None)
    limit = limits.host_bytes
    slots: list[int | None] = [None]
    if choices.update == "backward":
        slots += _SLOTS
    cast_free = None
    if choices.update is not None:
        cast_free = _cast_free(everything, moments, limits, slots)
    if limit is None or _nbytes(everything, moments, limits.states) <= limit:
        yield everything
        if cast_free is not None:
            yield cast_free
        return
    least: int | None = None
    fits = False
    for count in slots:
        kept, needed = _without_copies(replace(everything, gradient_slots=count), moments, limits)
        least = needed if least is None else min(least, needed)
        if kept is not None:
            fits = True
            yield kept
    if cast_free is not None:
        yield cast_free
    elif not fits:
        assert least is not None
        raise PlanError(
            f"model states and gradients need {least} bytes of host memory, and there are {limit}",
            moment=None,
            needed_bytes=least,
            available_bytes=limit,
        )


def _cast_free(
    kept: Kept, moments: Sequence[Moment], limits: Limits, slots: Sequence[int | None]
) -> Kept | None:
    """Let the device cast masters and gradients, if anything is cast and the host has the room;
    with as many gradients waiting as it has room for.
    """
    reduced = {c for m in moments for c in m.reduces}
    chunks = []
    for chunk in kept.chunks:
        slim = _masters_only(chunk, limits.states) if chunk.index in reduced else chunk
        chunks.append(replace(slim, wide=True) if slim.masters and _uniform(slim) else chunk)
    if not any(chunk.wide for chunk in chunks):
        return None
    for count in (slots[0], *reversed(slots[1:])):
        found = Kept(chunks=tuple(chunks), gradient_slots=count)
        limit = limits.host_bytes
        if limit is None or _nbytes(found, moments, limits.states) <= limit:
            return found
    return None


def _uniform(chunk: Chunk) -> bool:
    """Whether all masters are wider than their compute copies by the same factor."""
    pairs = zip(chunk.masters, chunk.content, strict=True)
    return len({m.nbytes / s.nbytes for m, s in pairs if s.nbytes}) == 1 and all(
        s.nbytes for s in chunk.content
    )


def _without_copies(
    kept: Kept, moments: Sequence[Moment], limits: Limits
) -> tuple[Kept | None, int]:
    """Give up compute copies until the rest fits; also the fewest bytes with which it would."""
    assert limits.host_bytes is not None
    chunks = list(kept.chunks)
    nbytes = _nbytes(kept, moments, limits.states)
    # Those first that the forward uses last: often still there when the backward begins, they are
    # fetched once where others are fetched twice.
    for index in range(len(chunks) - 1, -1, -1):
        if nbytes <= limits.host_bytes:
            break
        slim = _masters_only(chunks[index], limits.states)
        nbytes -= chunks[index].host_bytes - slim.host_bytes
        chunks[index] = slim
    if nbytes > limits.host_bytes:
        return None, nbytes
    return replace(kept, chunks=tuple(chunks)), nbytes


def _masters_only(chunk: Chunk, states: States) -> Chunk:
    """The chunk without compute copies on the host, if all of them are casts of masters."""
    if chunk.home is Home.DEVICE or not all(states.cast[s.parameter] for s in chunk.content):
        return chunk
    masters = []
    end = 0
    for slot in chunk.content:
        nbytes = states.masters[slot.parameter]
        masters.append(Slot(parameter=slot.parameter, offset=align(end), nbytes=nbytes))
        end = masters[-1].offset + nbytes
    return replace(chunk, masters=tuple(masters))


def _nbytes(kept: Kept, moments: Sequence[Moment], states: States) -> int:
    """Host bytes of the model states, with what an unknown optimizer may take."""
    reduced = {c for m in moments for c in m.reduces}
    at_home = [c for c in kept.chunks if c.home is Home.HOST]
    gradients = [c.gradient_bytes for c in at_home if c.index in reduced]
    return sum(c.host_bytes + states.room_of(c) for c in at_home) + gradient_bytes(
        gradients, kept.gradient_slots
    )
