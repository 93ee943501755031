"""Gradients: which chunks get their whole gradient from one segment, in tensors that can be copied.

In: segments and chunks. Out: for each segment the chunks, with the bytes of their gradients, whose
gradient it completes alone: each parameter's once, contiguous, in the chunk's dtype, and in memory
that the graph allocated for nothing else. A no-op for inference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from passes.graph import alias_root, is_memory, nbytes
from passes.plan import Chunk
from passes.segments import Segment


def whole_gradients(
    segments: Sequence[Segment], chunks: Sequence[Chunk]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each segment, the chunks whose gradient it completes as a whole, each with the bytes."""
    chunk_of = {slot.parameter: chunk for chunk in chunks for slot in chunk.content}
    times = Counter(parameter for s in segments for parameter, _ in s.gradients)
    segments_of = Counter(
        index for s in segments for index in {chunk_of[p].index for p, _ in s.gradients}
    )
    found = []
    for segment in segments:
        sizes: dict[int, int] = {}
        unfit = set()
        for parameter, value in segment.gradients:
            chunk = chunk_of[parameter]
            size = _own_bytes(value, chunk.dtype)
            if size is None or times[parameter] > 1 or segments_of[chunk.index] > 1:
                unfit.add(chunk.index)
            else:
                sizes[chunk.index] = sizes.get(chunk.index, 0) + size
        found.append(tuple((c, size) for c, size in sizes.items() if c not in unfit))
    return tuple(found)


def _is_returned(root: fx.Node) -> bool:
    """Whether the caller gets the memory of ``root``."""
    return any(alias_root(n) is root for n in root.graph.output_node().all_input_nodes)


def _own_bytes(value: fx.Node, dtype: torch.dtype) -> int | None:
    """Bytes of a gradient that is alone in its memory; None if it cannot be copied as it is."""
    root = alias_root(value)
    tensor = value.meta.get("val")
    # What the caller gave or gets may change once the backward is over; a weight has its own place.
    if root.op != "call_function" or is_memory(root, "fetch") or _is_returned(root):
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or not tensor.is_contiguous():
        return None
    size = nbytes(value)
    return size if isinstance(size, int) and nbytes(root) == size else None
