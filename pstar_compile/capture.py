"""From Dynamo's graph to tagged forward and backward graphs that the passes understand."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx

from passes.graph import META, MemoryNode, alias_root, is_memory, is_view, memory_nodes, tensors_of
from pstar_compile import ops
from pstar_compile.torch_compat import (
    checkpoint_region,
    inductor_joint_passes,
    input_position,
    mark_recompute,
    mark_save,
    min_cut_partition,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitioned:
    """The two graphs of a training step, tagged, with the backward's anchor gradients removed.

    Attributes:
        forward: the forward graph.
        backward: the backward graph.
        saved: backward placeholder -> forward output.
        anchor_gradients: position in the backward's outputs -> parameter index.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: Mapping[fx.Node, fx.Node]
    anchor_gradients: Mapping[int, int]


def tag(graph: fx.Graph, parameter_of_input: Mapping[int, int]) -> None:
    """Write into each fetch and reduce node which parameter it means.

    Args:
        graph: a graph as AOTAutograd traced it.
        parameter_of_input: Dynamo input position -> parameter index.
    """
    for node in graph.nodes:
        if node.target not in (ops.FETCH, ops.REDUCE):
            continue
        fetch = node.target is ops.FETCH
        anchor = node.args[0 if fetch else 1]
        position = input_position(anchor)
        assert position is not None
        node.meta[META] = MemoryNode(
            op="fetch" if fetch else "reduce", parameter=parameter_of_input[position]
        )


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy to rewrite; the nodes' values are shared."""
    copied_graph = fx.Graph()
    output = copied_graph.graph_copy(graph, {})
    copied_graph.output(output).meta = copy.copy(graph.output_node().meta)
    return copied_graph


def sparse_gradients(graph: fx.Graph, parameter_of_input: Mapping[int, int]) -> list[int]:
    """The parameters that get a sparse gradient in a joint graph; arguments as for :func:`tag`."""
    found: dict[int, None] = {}
    for node in graph.find_nodes(op="call_function", target=ops.REDUCE):
        grad, anchor = node.args[:2]
        if grad.meta["val"].layout is not torch.strided:
            position = input_position(anchor)
            assert position is not None
            found[parameter_of_input[position]] = None
    return list(found)


def partition(
    joint: fx.GraphModule,
    inputs: Any,
    parameter_of_input: Mapping[int, int],
    *,
    rewrite: bool,
    saved_fraction: float,
    **kwargs: Any,
) -> Partitioned:
    """Split a joint graph so that the backward fetches parameters anew instead of saving them.

    Args:
        joint: AOTAutograd's joint graph.
        inputs: its inputs.
        parameter_of_input: see :func:`tag`.
        rewrite: run Inductor's joint-graph rewrites first.
        saved_fraction: of the activations saved by default, what may be saved.
        kwargs: passed on to the partitioner.
    """
    _number_reduces(joint.graph)
    if rewrite:
        joint = inductor_joint_passes(joint)
    tag(joint.graph, parameter_of_input)
    _recompute_parameters(joint.graph)
    if saved_fraction < 1:
        _save_random(joint.graph)
    forward, backward = min_cut_partition(joint, inputs, saved_fraction=saved_fraction, **kwargs)
    outputs = {n.name: n for n in forward.graph.output_node().all_input_nodes}
    saved = {
        node: outputs[node.name]
        for node in backward.graph.find_nodes(op="placeholder")
        if node.name in outputs
    }
    _check_saves_no_parameter(forward.graph, saved)
    anchor_gradients = _cut_anchor_gradients(backward)
    return Partitioned(
        forward=forward, backward=backward, saved=saved, anchor_gradients=anchor_gradients
    )


def _number_reduces(graph: fx.Graph) -> None:
    """Keep common-subexpression elimination from merging equal gradients of two uses."""
    for number, node in enumerate(graph.find_nodes(op="call_function", target=ops.REDUCE)):
        node.args = (*node.args[:2], number)


def _recompute_parameters(graph: fx.Graph) -> None:
    """Tag each fetch, with the views and casts behind it, to be repeated in the backward.

    All of them get one id above every checkpointed region's, inside a region as well: the
    partitioner saves a recomputed node that a recomputed node with a higher id reads, and equal
    fetches of several regions and of the backward itself become one before it looks.
    """
    regions = [r for n in graph.nodes if (r := checkpoint_region(n)) is not None]
    above = max(regions, default=0) + 1
    for node in _behind_fetches(graph):
        mark_recompute(node, above)


def _save_random(graph: fx.Graph) -> None:
    """Tag what is drawn at random to be saved, outside of checkpointed regions, which restore the
    generator's state: below its default budget the partitioner would draw other numbers again.
    """
    for node in graph.nodes:
        if checkpoint_region(node) is None and _is_random(node):
            for each in (node, *(u for u in node.users if u.target is operator.getitem)):
                mark_save(each)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention takes a generator only for its dropout.
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _behind_fetches(graph: fx.Graph) -> set[fx.Node]:
    """The fetches of a tagged graph, and the views and casts of nothing else."""
    found = set(memory_nodes(graph, "fetch"))
    for node in graph.nodes:
        if (
            node.all_input_nodes
            and all(n in found for n in node.all_input_nodes)
            and (is_view(node) or node.target is torch.ops.aten._to_copy.default)
        ):
            found.add(node)
    return found


def _check_saves_no_parameter(forward: fx.Graph, saved: Mapping[fx.Node, fx.Node]) -> None:
    """Assert that the partitioner kept to our tags; else memory would grow, or worse, unseen."""
    parameters = _behind_fetches(forward)
    wrong = [f"{value}" for value in saved.values() if value in parameters]
    assert not wrong, (
        f"internal error: the partitioner saves parameters for the backward, which should fetch "
        f"them anew: {', '.join(wrong)}; please report this with the model's forward"
    )


def _cut_anchor_gradients(backward: fx.GraphModule) -> dict[int, int]:
    """Replace the anchors' gradients in the outputs by None; reduce nodes stay as side effects."""
    output = backward.graph.output_node()
    values = list(cast(Sequence[Any], output.args[0]))
    parameters: dict[fx.Node, int] = {}
    for node in backward.graph.nodes:
        if node.target is ops.REDUCE:
            parameters[node] = node.meta[META].parameter
        elif (
            node.op == "call_function"
            and node.all_input_nodes
            and all(n in parameters for n in node.all_input_nodes)
        ):
            # The sum of several reduces of a tied parameter.
            parameters[node] = parameters[node.all_input_nodes[0]]
    cut: dict[int, int] = {}
    for position, value in enumerate(values):
        if value in parameters:
            cut[position] = parameters[value]
            values[position] = None
    output.args = (tuple(values),)
    for node in reversed(list(backward.graph.nodes)):
        if node in parameters and node.target is not ops.REDUCE and not node.users:
            backward.graph.erase_node(node)
    _own_gradients(backward.graph)
    backward.recompile()
    return cut


def _own_gradients(graph: fx.Graph) -> None:
    """Copy a gradient that is one of the graph's inputs (``y = x + bias`` passes its tangent on)
    or a parameter: ``p.grad`` must not share memory with a tensor of the user's or a chunk.
    """
    for node in memory_nodes(graph, "reduce"):
        grad = node.args[0]
        assert isinstance(grad, fx.Node)
        root = alias_root(grad)
        if root.op == "placeholder" or is_memory(root, "fetch"):
            with graph.inserting_before(node):
                clone = graph.call_function(torch.ops.aten.clone.default, (grad,))
            clone.meta = {"val": torch.ops.aten.clone.default(grad.meta["val"])}
            node.replace_input_with(grad, clone)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeSource:
    """Where a symbolic size is read from a graph's arguments.

    Attributes:
        position: the argument.
        dim: the dimension of a tensor argument; None: the argument is the size itself.
        hint: the size at compile time.
    """

    position: int
    dim: int | None
    hint: int

    def read(self, args: Sequence[Any]) -> int:
        """The size in a call with these arguments."""
        value = args[self.position]
        return int(value if self.dim is None else value.shape[self.dim])


def symbols_of(graph: fx.Graph) -> dict[sympy.Symbol, SizeSource]:
    """The symbolic sizes of a graph's inputs."""
    found: dict[sympy.Symbol, SizeSource] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        sizes: list[tuple[int | None, Any]] = [(None, value)]
        if isinstance(value, torch.Tensor):
            sizes = list(enumerate(value.shape))
        for dim, size in sizes:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                source = SizeSource(position=position, dim=dim, hint=int(size.node.hint))
                found.setdefault(size.node.expr, source)
    return found


def inner_symbols(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """Symbolic sizes that arise inside a graph (a saved RNG state's, say), with their hints."""
    found: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        for tensor in tensors_of(node.meta.get("val")):
            for size in tensor.shape:
                if (
                    isinstance(size, torch.SymInt)
                    and isinstance(size.node.expr, sympy.Symbol)
                    and size.node.hint is not None
                ):
                    found.setdefault(size.node.expr, int(size.node.hint))
    return found


def anchor_positions(graph: fx.Graph, parameter_of_input: Mapping[int, int]) -> dict[int, int]:
    """Parameter index -> position of its anchor among a forward graph's placeholders.

    Args:
        graph: the forward or inference graph.
        parameter_of_input: see :func:`tag`.
    """
    found: dict[int, int] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        origin = input_position(node)
        if origin is not None and origin in parameter_of_input:
            found[parameter_of_input[origin]] = position
    return found


def saved_anchor_positions(graph: fx.Graph) -> dict[int, int]:
    """Parameter index -> position of its anchor among a tagged backward graph's placeholders."""
    positions = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
    found: dict[int, int] = {}
    anchors = [(n, n.args[0]) for n in memory_nodes(graph, "fetch")]
    anchors += [(n, n.args[1]) for n in memory_nodes(graph, "reduce")]
    for node, anchor in anchors:
        assert isinstance(anchor, fx.Node)
        found.setdefault(node.meta[META].parameter, positions[anchor])
    return found
