"""Direct: which gradients leave the device from where they were computed.

In: chunks and moments. Out: the chunks whose gradient needs no place in the arena, and the moments
before which the compute stream waits for such an offload and its memory is given back. A gradient
may leave directly if one moment produces the whole of it and, while it leaves, it fits beside the
non-model data of the moments that follow, below the largest such data of the step: memory that the
step needs anyway. What leaves last is still leaving when the next step begins, and is discarded
there. A no-op for inference.

Before (two backward moments that reduce chunks 1 and 0; live bytes 100, 60, 60)::

    m1 reduces 1, 40 bytes    m2 reduces 0, 40 bytes

After::

    1 and 0 leave directly; both are discarded in the next forward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.plan import Chunk, Direction, Home, Moment

_HELD_FOR = 2
"""Moments for which a gradient is held at least, so that no moment waits for a copy that has just
begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """Gradients without a place in the arena.

    Attributes:
        nbytes: chunk -> bytes of its gradient.
        discards: position of a moment -> chunks whose gradient is given back before it computes.
    """

    nbytes: Mapping[int, int]
    discards: Mapping[int, tuple[int, ...]]


def direct(chunks: Sequence[Chunk], moments: Sequence[Moment]) -> Direct:
    """Choose the gradients that leave directly, first come, first served."""
    host = {chunk.index for chunk in chunks if chunk.home is Home.HOST}
    forward = [p for p, m in enumerate(moments) if m.direction is Direction.FORWARD]
    ceiling = max((moment.live_bytes for moment in moments), default=0)
    spare = [ceiling - moment.live_bytes for moment in moments]
    nbytes: dict[int, int] = {}
    discards: dict[int, list[int]] = {}
    late: list[int] = []
    for position, moment in enumerate(moments):
        for chunk, gradient in moment.direct:
            due = position + 1 + _HELD_FOR
            span = range(position + 1, min(due, len(moments)))
            if chunk not in host or any(spare[p] < gradient for p in span):
                continue
            if due < len(moments):
                discards.setdefault(due, []).append(chunk)
            elif forward:
                late.append(chunk)
            else:
                continue
            nbytes[chunk] = gradient
            for p in span:
                spare[p] -= gradient
    if late:
        total = sum(nbytes[chunk] for chunk in late)
        # As late in the next forward as there is room for them: their copies go on beside it.
        last = next((p for p in forward if spare[p] < total), forward[-1])
        discards.setdefault(last, []).extend(late)
    return Direct(nbytes=nbytes, discards={p: tuple(c) for p, c in discards.items()})
