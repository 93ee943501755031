"""Localize: no alias of a fetched parameter crosses from one compute node to another.

In: a captured graph. Out: the same graph, in which each parameter is fetched by one node at the
top, each consumer has its own copy of the views between the fetch and itself, and what leaves the
graph is never a view of a parameter. No-op for graphs without fetch nodes. ::

    w = fetch(anchor)               w = fetch(anchor)
    t = permute(w)                  a = ...
    a = ...                         t = permute(w)
    y = mm(a, t)                    y = mm(a, t)
    z = mm(y, t)                    t_1 = permute(w)
    return z, t                     z = mm(y, t_1)
                                    t_2 = permute(w); c = clone(t_2)
                                    return z, c
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph import META, is_memory, is_view, memory_nodes


def localize(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``gm`` in place as the module says, and return it."""
    graph = gm.graph
    _merge_fetches(graph)
    derived: set[fx.Node] = set(memory_nodes(graph, "fetch"))
    views: list[fx.Node] = []
    for node in graph.nodes:
        if is_view(node) and node.all_input_nodes[0] in derived:
            derived.add(node)
            views.append(node)
    for node in list(graph.nodes):
        if node in derived or is_memory(node, "fetch"):
            continue
        used = [n for n in node.all_input_nodes if n in derived]
        if not used:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        replacements: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(node):
            for value in used:
                copy = _copy_chain(graph, value, copies)
                replacements[value] = _clone(graph, copy) if node.op == "output" else copy
        _replace_inputs(node, replacements)
    for node in reversed(views):
        if not node.users:
            graph.erase_node(node)
    gm.recompile()
    return gm


def _merge_fetches(graph: fx.Graph) -> None:
    first: dict[int, fx.Node] = {}
    place = None
    for node in graph.nodes:
        if node.op == "placeholder":
            place = node
    for node in memory_nodes(graph, "fetch"):
        parameter = node.meta[META].parameter
        if parameter in first:
            node.replace_all_uses_with(first[parameter])
            graph.erase_node(node)
            continue
        first[parameter] = node
        assert place is not None
        place.append(node)
        place = node


def _copy_chain(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Repeat the views between a fetch and ``node`` at the present insertion point."""
    if is_memory(node, "fetch"):
        return node
    if node not in copies:
        for source in node.all_input_nodes:
            if is_view(source) or is_memory(source, "fetch"):
                copies[source] = _copy_chain(graph, source, copies)
        copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
    return copies[node]


def _clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
    clone = graph.call_function(torch.ops.aten.clone.default, (node,))
    clone.meta = {"val": torch.ops.aten.clone.default(node.meta["val"])}
    return clone


def _replace_inputs(node: fx.Node, replacements: dict[fx.Node, fx.Node]) -> None:
    node.args = fx.map_arg(node.args, lambda n: replacements.get(n, n))
    node.kwargs = fx.map_arg(node.kwargs, lambda n: replacements.get(n, n))
