"""Chunking: which parameters move together.

In: parameters and the order in which the step first uses them. Out: chunks with their layout. A
chunk holds one dtype and one ``requires_grad``, and is exactly as long as its content. The chunks
of a model's equal layers are equal. Their homes are open, see ``placement``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from passes.plan import Chunk, Home, Parameter, Slot, align

_FRACTIONS = (2, 3, 4, 8)
_APART = 8
_SMALL = 16
_LAYERS = 4


def chunk(
    parameters: Sequence[Parameter],
    order: Sequence[int],
    spread: Mapping[int, int],
    *,
    target_bytes: int | None,
) -> tuple[Chunk, ...]:
    """Pack parameters into chunks in first-use order.

    Args:
        parameters: all parameters, by index.
        order: the parameters to pack, in first-use order.
        spread: in how many places apart a parameter is used. One that is used in several, and
            is not small, becomes a chunk of its own, so that nothing else must stay with it.
        target_bytes: a chunk is closed before it grows beyond this; a larger parameter is a chunk
            of its own. None: no limit.
    """
    packer = _Packer(parameters, target_bytes)
    start, end, period = repeating_run([_signature(parameters[i]) for i in order])
    position = 0
    while position < len(order):
        if start <= position and position + period <= end:
            packer.add_unit(order[position : position + period])
            position += period
        else:
            index = order[position]
            packer.add(index, apart=spread.get(index, 1) > 1)
            position += 1
    groups = _merge_small(packer.chunks, parameters, target_bytes)
    return tuple(_layout(number, members, parameters) for number, members in enumerate(groups))


class _Packer:
    """Greedy packing with one open chunk per kind (dtype and ``requires_grad``)."""

    def __init__(self, parameters: Sequence[Parameter], target: int | None) -> None:
        self.chunks: list[list[int]] = []
        self._parameters = parameters
        self._target = target
        self._open: dict[tuple[torch.dtype, bool], list[int]] = {}
        self._whole_units = False

    def add(self, index: int, *, apart: bool) -> None:
        """Add one parameter; one used in places apart is kept apart, unless it is small."""
        if self._whole_units:
            self._open.clear()
            self._whole_units = False
        size = self._size(index)
        target = self._target
        if target is not None and (size >= target or (apart and size * _APART >= target)):
            self.chunks.append([index])
            # What follows in use order does not join what came before.
            self._open.clear()
            return
        self._pack(index)

    def add_unit(self, indices: Sequence[int]) -> None:
        """Add one repetition of a repeating run. Chunks begin where a repetition does, so that the
        segments of equal layers are equal; several repetitions share a chunk only as a whole.
        """
        sizes = self._sizes(indices)
        fits = self._target is None or all(
            self._filled(kind) + size <= self._target for kind, size in sizes.items()
        )
        if self._target is not None and not (self._whole_units and fits):
            self._open.clear()
        self._whole_units = self._target is None or all(
            size <= self._target for size in sizes.values()
        )
        for index in indices:
            self._pack(index)

    def _pack(self, index: int) -> None:
        parameter = self._parameters[index]
        kind = (parameter.dtype, parameter.requires_grad)
        full = self._target is not None and self._filled(kind) + self._size(index) > self._target
        if kind not in self._open or full:
            self._open[kind] = []
            self.chunks.append(self._open[kind])
        self._open[kind].append(index)

    def _size(self, index: int) -> int:
        return align(self._parameters[index].nbytes)

    def _filled(self, kind: tuple[torch.dtype, bool]) -> int:
        return sum(self._size(i) for i in self._open.get(kind, ()))

    def _sizes(self, indices: Sequence[int]) -> dict[tuple[torch.dtype, bool], int]:
        sizes: dict[tuple[torch.dtype, bool], int] = {}
        for index in indices:
            parameter = self._parameters[index]
            kind = (parameter.dtype, parameter.requires_grad)
            sizes[kind] = sizes.get(kind, 0) + self._size(index)
        return sizes


def _merge_small(
    groups: Sequence[list[int]], parameters: Sequence[Parameter], target: int | None
) -> list[list[int]]:
    """Let what is small beside the target join its predecessor in use order, if that is of its
    kind: a segment and a copy of its own would cost more than it moves.
    """
    merged: list[list[int]] = []
    joined = 0
    for members in groups:
        size = sum(align(parameters[i].nbytes) for i in members)
        kind = parameters[members[0]]
        if (
            target is not None
            and merged
            and (joined + size) * _SMALL <= target
            and (parameters[merged[-1][0]].dtype, parameters[merged[-1][0]].requires_grad)
            == (kind.dtype, kind.requires_grad)
        ):
            merged[-1].extend(members)
            joined += size
        else:
            merged.append(list(members))
            joined = 0
    return merged


def _signature(parameter: Parameter) -> tuple[object, ...]:
    return (parameter.shape, parameter.dtype, parameter.requires_grad)


def repeating_run(signatures: Sequence[object]) -> tuple[int, int, int]:
    """The longest stretch that repeats itself: ``(start, end, period)``.

    ``[a, b, c, b, c, b, c, d]`` gives ``(1, 7, 2)``: a model's equal layers. Without a repetition
    the stretch is empty.
    """
    best = (0, 0, 1)
    count = len(signatures)
    for period in range(1, count // 2 + 1):
        if count - period <= best[1] - best[0] - period:
            break
        start = 0
        for i in range(count - period + 1):
            if i < count - period and signatures[i] == signatures[i + period]:
                continue
            matched = i - start
            length = (matched + period) // period * period
            if matched >= period and length > best[1] - best[0]:
                best = (start, start + length, period)
            start = i + 1
    return best


def _layout(index: int, members: Sequence[int], parameters: Sequence[Parameter]) -> Chunk:
    slots: list[Slot] = []
    end = 0
    for member in members:
        slots.append(Slot(parameter=member, offset=align(end), nbytes=parameters[member].nbytes))
        end = slots[-1].offset + slots[-1].nbytes
    first = parameters[members[0]]
    return Chunk(
        index=index,
        home=Home.HOST,
        dtype=first.dtype,
        requires_grad=first.requires_grad,
        content=tuple(slots),
        nbytes=end,
    )


def layer_bytes(parameters: Sequence[Parameter], order: Sequence[int]) -> int | None:
    """Bytes of one repetition of the model's repeating run; None if hardly anything repeats."""
    start, end, period = repeating_run([_signature(parameters[i]) for i in order])
    if end - start < _LAYERS * period:
        return None
    return sum(align(parameters[i].nbytes) for i in order[start : start + period])


def candidate_sizes(
    parameters: Sequence[Parameter], order: Sequence[int], *, capacity_bytes: int
) -> tuple[int, ...]:
    """Chunk sizes worth simulating, in bytes, ascending.

    One, two and three repetitions of the model's repeating run, halves of it, and fractions of the
    room. Small chunks cost latency and segments; large ones cost overlap and fit less well.

    Args:
        parameters: all parameters, by index.
        order: the parameters to pack, in first-use order.
        capacity_bytes: room for resident chunks.
    """
    sizes = [align(parameters[i].nbytes) for i in order]
    start, end, period = repeating_run([_signature(parameters[i]) for i in order])
    unit = sum(sizes[start : start + period]) if end > start else 0
    largest = max(sizes)
    wanted = {largest, unit // 2, unit, 2 * unit, 3 * unit}
    wanted.update(capacity_bytes // fraction // 256 * 256 for fraction in _FRACTIONS)
    least = max(largest // 4, 256)
    fitting = sorted(w for w in wanted if least <= w <= max(capacity_bytes // 2, largest))
    return tuple(fitting) or (largest or 256,)
