"""Find parameters that a compiled forward writes in place.

AOTAutograd makes a graph functional, so nothing in its result says that a fetched copy was written.
Therefore each fetch is read once more at the end of Dynamo's graph; what that read becomes tells. A
no-op for graphs without fetches. ::

    w = fetch(anchor)                        w = fetch(anchor)
    w.clamp_(0, 1)                           c = clamp(w, 0, 1)
    return x @ w                             y = mm(x, c)
                                             unwritten(c, anchor)    # c is not w: w was written
                                             return y
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx

from passes.graph import alias_root
from pstar_compile import ops
from pstar_compile.torch_compat import checkpointed_bodies, input_position


@contextmanager
def reading_fetches_last(gm: fx.GraphModule) -> Iterator[None]:
    """While inside, a Dynamo graph and its checkpointed bodies read each fetch at their end."""
    bodies = [gm, *checkpointed_bodies(gm)]
    added = [node for body in bodies for node in _read_last(body.graph)]
    try:
        yield
    finally:
        for node in added:
            node.graph.erase_node(node)


def _read_last(graph: fx.Graph) -> list[fx.Node]:
    fetches = [n for n in graph.nodes if n.target in (torch.ops.pstar.fetch, ops.FETCH)]
    with graph.inserting_before(graph.output_node()):
        return [graph.call_function(ops.UNWRITTEN, (n, n.args[0])) for n in fetches]


def take_written(graph: fx.Graph, parameter_of_input: Mapping[int, int]) -> list[int]:
    """Remove the last reads from a functional graph; returns the parameters that were written.

    Args:
        graph: a graph as AOTAutograd traced it.
        parameter_of_input: Dynamo input position -> parameter index.
    """
    written: dict[int, None] = {}
    for node in graph.find_nodes(op="call_function", target=ops.UNWRITTEN):
        value, anchor = node.args
        if alias_root(value).target is not ops.FETCH:
            position = input_position(anchor)
            assert position is not None
            written[parameter_of_input[position]] = None
        graph.erase_node(node)
    return list(written)
