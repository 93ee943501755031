"""Segments: the maximal runs of compute nodes between two memory nodes.

In: lifetimes and the chunk of each parameter. Out: segments. A segment starts where a node reads a
chunk that the running segment does not read::

    chunk of w1, w2: 0, of w3: 1
    a = mm(x, w1)     segment 0, needs chunk 0
    b = mm(a, w2)     segment 0
    c = relu(b)       segment 0
    d = mm(c, w3)     segment 1, needs chunk 1

Without chunks the whole graph is one segment.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from passes.graph import META, is_memory, is_view, tensors_of
from passes.lifetimes import Lifetimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One unit of compilation and execution.

    Attributes:
        index: position among the segments of its graph.
        nodes: its nodes in order, views of fetched parameters included.
        needs: the chunks it reads, ascending.
        parameters: the parameters it reads, in order of first use.
        inputs: values from outside other than parameters: graph inputs, other segments' outputs.
        constants: the ``get_attr`` nodes it uses.
        outputs: values that later segments, reduce nodes or the graph's output use.
        gradients: the gradients that are complete with it: parameter and value, in reduce order.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    needs: tuple[int, ...]
    parameters: tuple[int, ...]
    inputs: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[tuple[int, fx.Node], ...]


def split(
    lifetimes: Lifetimes, chunk_of: Mapping[int, int], *, graph: fx.Graph
) -> tuple[Segment, ...]:
    """Cut a graph into segments.

    Args:
        lifetimes: of ``graph``.
        chunk_of: chunk of each parameter that is paged; others never start a segment.
        graph: the localized graph.
    """
    starts = _starts(lifetimes, chunk_of)
    segment_of: dict[fx.Node, int] = {}
    current = -1
    for position, node in enumerate(lifetimes.nodes):
        if position in starts:
            current += 1
        segment_of[node] = current
    count = current + 1
    members: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in lifetimes.nodes:
        if node.target is operator.getitem:
            # A tuple never leaves the segment that makes it.
            segment_of[node] = segment_of[node.all_input_nodes[0]]
    for node in graph.nodes:
        if node in segment_of:
            members[segment_of[node]].append(node)
        elif is_view(node) and node.users:
            # A view of a fetched parameter stands right before its only consumer.
            owner = _consumer(node, segment_of)
            if owner is not None:
                segment_of[node] = owner
                members[owner].append(node)
    gradients: list[list[tuple[int, fx.Node]]] = [[] for _ in range(count)]
    for position, parameter, value in lifetimes.gradients:
        home = 0 if position < 0 else segment_of[lifetimes.nodes[position]]
        gradients[home].append((parameter, value))
    symbol_inputs = _symbol_inputs(graph)
    return tuple(
        _segment(i, nodes, segment_of, gradients[i], lifetimes, chunk_of, symbol_inputs)
        for i, nodes in enumerate(members)
    )


def _starts(lifetimes: Lifetimes, chunk_of: Mapping[int, int]) -> set[int]:
    """Positions at which segments start. A node that produces a gradient counts as a use of the
    gradient's chunk, so that a chunk's gradient need not wait for another chunk's.
    """
    starts = {0} if lifetimes.nodes else set()
    produced: dict[int, set[int]] = {}
    for position, parameter, _ in lifetimes.gradients:
        if parameter in chunk_of:
            produced.setdefault(position, set()).add(chunk_of[parameter])
    needs: set[int] | None = None
    for position, uses in enumerate(lifetimes.uses):
        chunks = {chunk_of[p] for p in uses if p in chunk_of} | produced.get(position, set())
        if not chunks:
            continue
        if needs is None:
            needs = chunks
        elif not chunks <= needs:
            starts.add(position)
            needs = chunks
    return starts


def _consumer(node: fx.Node, segment_of: Mapping[fx.Node, int]) -> int | None:
    while True:
        user = next(iter(node.users), None)
        if user is None:
            return None
        if user in segment_of:
            return segment_of[user]
        node = user


def _segment(
    index: int,
    nodes: list[fx.Node],
    segment_of: Mapping[fx.Node, int],
    gradients: list[tuple[int, fx.Node]],
    lifetimes: Lifetimes,
    chunk_of: Mapping[int, int],
    symbol_inputs: Mapping[object, fx.Node],
) -> Segment:
    own = set(nodes)
    parameters: dict[int, None] = {}
    inputs: dict[fx.Node, None] = {}
    constants: dict[fx.Node, None] = {}
    outputs: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if is_memory(source, "fetch"):
                parameters.setdefault(source.meta[META].parameter)
            elif source.op == "get_attr":
                constants.setdefault(source)
            elif source not in own:
                inputs.setdefault(source)
        if any(user not in own for user in node.users):
            outputs.setdefault(node)
    for symbol in _free_symbols(nodes):
        if symbol in symbol_inputs:
            inputs.setdefault(symbol_inputs[symbol])
    return Segment(
        index=index,
        nodes=tuple(nodes),
        needs=tuple(sorted({chunk_of[p] for p in parameters if p in chunk_of})),
        parameters=tuple(parameters),
        inputs=tuple(inputs),
        constants=tuple(constants),
        outputs=tuple(outputs),
        gradients=tuple(gradients),
    )


def _symbol_inputs(graph: fx.Graph) -> dict[object, fx.Node]:
    """The graph inputs that carry a symbolic size, by symbol."""
    found: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(value.node.expr, node)
    return found


def _free_symbols(nodes: list[fx.Node]) -> list[object]:
    """Symbols in the sizes of the nodes' values, in order of appearance."""
    found: dict[object, None] = {}
    for node in nodes:
        value = node.meta.get("val")
        sizes: list[object] = [value] if isinstance(value, torch.SymInt) else []
        for tensor in tensors_of(value):
            sizes.extend((*tensor.shape, *tensor.stride()))
        for size in sizes:
            if isinstance(size, torch.SymInt):
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    found.setdefault(symbol)
    return list(found)
