"""Placement: which chunks' model states live on the device, and which on the host.

In: chunks, moments with their non-model bytes, the bytes of the states, the limits. Out: the chunks
with a home. The device is filled first; chunks whose gradients come last in the backward are the
first to live there, because their update cannot hide behind it. A no-op for chunks that have a home
already, except that they may have to leave the device.

Before (room for two of three chunks; the backward reduces 2, 1, 0)::

    0 open    1 open    2 open

After::

    0 device  1 device  2 host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.plan import Chunk, Home, Moment


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Model states beside the compute copies, by parameter. Bytes.

    Attributes:
        nbytes: master, where the compute copy is a cast of it, and optimizer states.
        room: what an optimizer that the plan does not know may take in addition.
        cast: whether the compute copy is a cast of the master.
        masters: the masters themselves.
        homes: where the parameter's chunk lives already; None: open.
        model_bytes: all states, gradients and room of the whole model.
        resident_bytes: compute copies and gradients of the whole model.
        others_bytes: states of parameters outside the graph, where the home is the device.
    """

    nbytes: tuple[int, ...]
    room: tuple[int, ...]
    cast: tuple[bool, ...]
    masters: tuple[int, ...]
    homes: tuple[Home | None, ...]
    model_bytes: int
    resident_bytes: int
    others_bytes: int

    def of(self, chunk: Chunk) -> Chunk:
        """The chunk with the bytes of its states, and the home that it has already."""
        members = [slot.parameter for slot in chunk.content]
        home = next((self.homes[p] for p in members if self.homes[p] is not None), None)
        return replace(
            chunk,
            home=home or chunk.home,
            # What the host keeps is decided anew by each plan.
            masters=(),
            wide=False,
            state_bytes=sum(self.nbytes[p] for p in members),
            cast_bytes=sum(s.nbytes for s in chunk.content if self.cast[s.parameter]),
        )

    def is_open(self, chunk: Chunk) -> bool:
        """Whether the chunk has no home yet."""
        return all(self.homes[slot.parameter] is None for slot in chunk.content)

    def room_of(self, chunk: Chunk) -> int:
        """What an unknown optimizer may take for the chunk."""
        return sum(self.room[slot.parameter] for slot in chunk.content)


def together(chunks: Sequence[Chunk], states: States, home: Home) -> tuple[Chunk, ...]:
    """Give every chunk that is open the same home."""
    return tuple(
        states.of(replace(chunk, home=home) if states.is_open(chunk) else chunk) for chunk in chunks
    )


def fill(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    states: States,
    *,
    available: int,
    gradients_stay: bool,
) -> tuple[Chunk, ...]:
    """Give chunks their home on the device while there is room, and the others on the host.

    Args:
        chunks: the chunks; one whose home is the host already stays there.
        moments: with their non-model bytes, as if no chunk lived on the device.
        states: the model's states.
        available: bytes of device memory for non-model data and states: the budget without the
            arena and what is reserved.
        gradients_stay: whether gradients stay until the step ends.
    """
    known = [states.of(chunk) for chunk in chunks]
    reduced = {c: m.index for m in moments for c in m.reduces}
    spare = [available - moment.live_bytes for moment in moments]
    homes: dict[int, Home] = {}
    # Frozen chunks first: they cost no states, and their fetches twice their size.
    order = sorted(known, key=lambda c: (-reduced.get(c.index, len(moments)), c.index))
    for chunk in order:
        fixed = not states.is_open(chunk) and chunk.home is Home.HOST
        at_home = replace(chunk, home=Home.DEVICE)
        always = states.room_of(chunk) + at_home.device_bytes
        live = live_at_home(at_home, moments, gradients_stay=gradients_stay)
        cost = [always + nbytes for nbytes in live]
        if fixed or any(s < c for s, c in zip(spare, cost, strict=True)):
            homes[chunk.index] = Home.HOST
            continue
        homes[chunk.index] = Home.DEVICE
        spare = [s - c for s, c in zip(spare, cost, strict=True)]
    return tuple(replace(c, home=homes[c.index]) for c in known)


def live_at_home(chunk: Chunk, moments: Sequence[Moment], *, gradients_stay: bool) -> list[int]:
    """Bytes of a chunk on the device that come and go, by moment.

    They are casts while they are read, and its gradient once that is complete: to the end of the
    step, or to the update, which also takes the gradient in the masters' dtype for a while.

    Args:
        chunk: the chunk.
        moments: the moments.
        gradients_stay: whether gradients stay until the step ends.
    """
    reads = [m.index for m in moments if chunk.index in m.needs]
    reduces = [m.index for m in moments if chunk.index in m.reduces]
    complete = max(reduces, default=len(moments))
    updated = max(complete, *reads) if reads else complete
    found = []
    for moment in moments:
        nbytes = chunk.cast_bytes if chunk.index in moment.needs else 0
        if moment.index > complete and (gradients_stay or moment.index <= updated):
            nbytes += chunk.nbytes
        if moment.index == updated and not gradients_stay:
            nbytes += 2 * chunk.cast_bytes
        found.append(nbytes)
    return found
