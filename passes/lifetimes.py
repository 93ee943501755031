"""Lifetimes: where each parameter is read, and where each gradient is complete.

In: a captured, localized graph. Out: its compute nodes in order, the parameters each one reads
(directly or through views), and the gradients by producing node. Rewrites nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.graph import META, is_memory, is_view, memory_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """Uses of parameters by position.

    Attributes:
        nodes: compute nodes in order; views of fetched parameters belong to their consumer.
        uses: for each of them the parameters it reads.
        gradients: position of the producing compute node (-1: an input), parameter, value; in the
            order of the reduce nodes.
    """

    nodes: tuple[fx.Node, ...]
    uses: tuple[frozenset[int], ...]
    gradients: tuple[tuple[int, int, fx.Node], ...]


def lifetimes(graph: fx.Graph) -> Lifetimes:
    """Find all uses of parameters in a localized graph."""
    reads: dict[fx.Node, frozenset[int]] = {}
    nodes: list[fx.Node] = []
    uses: list[frozenset[int]] = []
    for node in graph.nodes:
        if is_memory(node, "fetch"):
            reads[node] = frozenset((node.meta[META].parameter,))
            continue
        if node.op in ("placeholder", "get_attr", "output") or is_memory(node, "reduce"):
            continue
        read = frozenset[int]().union(*(reads[n] for n in node.all_input_nodes if n in reads))
        if read and is_view(node):
            reads[node] = read
            continue
        nodes.append(node)
        uses.append(read)
    position = {n: i for i, n in enumerate(nodes)}
    gradients = tuple(
        (position.get(n.all_input_nodes[0], -1), n.meta[META].parameter, n.all_input_nodes[0])
        for n in memory_nodes(graph, "reduce")
    )
    return Lifetimes(nodes=tuple(nodes), uses=tuple(uses), gradients=gradients)
