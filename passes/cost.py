"""Cost: predicted seconds of a segment.

In: a segment and the machine's rates. Out: seconds. A matmul-like node takes the longer of its
floating-point operations and its bytes; everything else is assumed to fuse, so the rest of the
segment costs the bytes that enter and leave it, or that pass between matmuls. Views cost nothing.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes.graph import is_view, tensors_of
from passes.plan import Rates
from passes.segments import Segment


def segment_seconds(
    segment: Segment, rates: Rates, known: MutableMapping[fx.Node, int] | None = None
) -> float:
    """Predicted seconds of one segment on the compute stream, launch latency not included.

    Args:
        segment: the segment.
        rates: the machine's.
        known: operations of nodes that were counted before; filled on the way. Several cuts of one
            graph then count each node once.
    """
    known = {} if known is None else known
    seconds = 0.0
    fused = 0
    for node in segment.inputs + segment.outputs:
        fused += _hinted_bytes(node)
    for node in segment.nodes:
        flops = known.get(node)
        if flops is None:
            flops = known[node] = node_flops(node)
        if flops == 0:
            continue
        moved = _hinted_bytes(node) + sum(_hinted_bytes(n) for n in node.all_input_nodes)
        fused += _hinted_bytes(node)
        dtype = next((t.dtype for t in tensors_of(node.meta.get("val"))), torch.float32)
        rate = rates.flops.get(dtype, rates.flops[torch.float32])
        seconds += max(flops / rate, moved / rates.memory)
    return seconds + fused / rates.memory


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of a node, by torch's own formulas; 0 where there is none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    formula = flop_registry.get(node.target.overloadpacket)
    if formula is None or is_view(node):
        return 0
    arguments = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    keywords = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    return int(
        formula(*_hinted(arguments), **_hinted(keywords), out_val=_hinted(node.meta.get("val")))
    )


def _hinted(value: Any) -> Any:
    """Replace symbolic sizes by their hints, and tensors by stand-ins with such shapes."""
    if isinstance(value, torch.Tensor):
        shape = [_hint(s) for s in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if isinstance(value, dict):
        return {k: _hinted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hinted(v) for v in value)
    return value


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _hinted_bytes(node: fx.Node) -> int:
    total = 0
    for tensor in tensors_of(node.meta.get("val")):
        elements = 1
        for size in tensor.shape:
            elements *= _hint(size)
        total += elements * tensor.element_size()
    return total
