"""Shared finders on FX graphs: memory nodes, views and the storage they share, byte sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx

META = "pstar"
"""The one key of ``node.meta`` that the project uses."""

Bytes: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """What a captured fetch or reduce node means: which parameter of the plan."""

    op: Literal["fetch", "reduce"]
    parameter: int


def memory_nodes(graph: fx.Graph, op: Literal["fetch", "reduce"]) -> list[fx.Node]:
    """The fetch or reduce nodes of a captured graph, in order."""
    return [n for n in graph.nodes if is_memory(n, op)]


def is_memory(node: fx.Node, op: Literal["fetch", "reduce"]) -> bool:
    """Whether a node is a captured fetch (or reduce)."""
    decision = node.meta.get(META)
    return isinstance(decision, MemoryNode) and decision.op == op


# Ops that return their input, or views of it, whatever their schemas say.
_MAY_ALIAS = frozenset(
    {
        torch.ops.aten.contiguous.default,
        torch.ops.aten.reshape.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten._reshape_alias.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
        torch.ops.aten.unsafe_chunk.default,
    }
)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the storage of its first input."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if node.target in _MAY_ALIAS:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns
    )


def alias_root(node: fx.Node) -> fx.Node:
    """The node that owns the storage of ``node``'s result."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a node's ``meta["val"]``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensors_of(element)


def nbytes(node: fx.Node) -> Bytes:
    """Bytes of the storage a node's result spans; symbolic sizes stay sympy expressions."""
    total: Bytes = 0
    for tensor in tensors_of(node.meta.get("val")):
        total = total + _tensor_bytes(tensor)
    return total


def _tensor_bytes(tensor: torch.Tensor) -> Bytes:
    if tensor.layout is not torch.strided:
        return _plain(tensor.numel()) * tensor.element_size()
    extent: Bytes = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        length = _plain(size)
        if isinstance(length, int) and length == 0:
            return 0
        extent = extent + (length - 1) * _plain(stride)
    return extent * tensor.element_size()


def _plain(size: Any) -> Bytes:
    """A size as int or sympy expression. Never guards."""
    if isinstance(size, torch.SymInt):
        expression: sympy.Expr = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)
