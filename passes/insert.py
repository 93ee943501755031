"""Insert: write a step's memory nodes and segment calls as one outer graph.

In: a graph, its segments, and the actions of a schedule. Out: a GraphModule that calls nothing but
methods of a ``run`` object (its first argument) and the segments::

    before                          after
    w = fetch(anchor, [4, 4])       run.fetch(0)
    h = mm(x, w)                    run.wait(1)
    y = relu(h)                     arguments_0 = run.arguments(0, x);  x = None
    return y                        segment_0 = self.segment_0(arguments_0)
                                    run.release(3)
                                    return segment_0[0]

A number is the action's index in the schedule (the moment, for ``arguments``). A segment gets its
arguments in one list that it empties, so that each is freed at its last use inside the segment.
Never a no-op: a graph without memory nodes becomes one segment call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.graph import META
from passes.plan import Action, Chunk, Kind
from passes.segments import Segment


def insert(
    source: fx.GraphModule,
    segments: Sequence[Segment],
    actions: Sequence[Action],
    chunks: Sequence[Chunk],
    targets: Mapping[int, torch.nn.Module],
    *,
    first_moment: int,
) -> tuple[fx.GraphModule, dict[int, tuple[int, ...]]]:
    """Build the outer graph of one direction of a step.

    Args:
        source: the graph that was split into ``segments``.
        segments: its segments, in order; the first runs at moment ``first_moment``.
        actions: the schedule's actions of these moments, in order.
        chunks: all chunks of the plan.
        targets: for each moment the module that runs its segment; equal segments share one.
        first_moment: the moment of the first segment.

    Returns:
        The outer graph, and for each reduce action the parameters whose gradients it takes.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    modules: dict[str, torch.nn.Module] = {}
    names: dict[torch.nn.Module, str] = {}
    contributions: dict[int, tuple[int, ...]] = {}
    waited_on = {i for action in actions for i in action.after}
    chunk_of = {slot.parameter: c.index for c in chunks for slot in c.content}

    run = graph.placeholder("run")
    for node in source.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)

    def call(method: str, action: Action, *args: fx.Node) -> None:
        node = graph.call_method(method, (run, action.index, *args))
        node.name = graph._graph_namespace.create_name(_label(method, action), node)
        node.meta[META] = action

    for action in actions:
        segment = segments[action.moment - first_moment]
        if action.kind is Kind.COMPUTE:
            arguments = graph.call_method(
                "arguments", (run, action.moment, *(values[n] for n in segment.inputs))
            )
            arguments.meta[META] = action
            target = targets[action.moment]
            name = names.setdefault(target, f"segment_{len(names)}")
            modules[name] = target
            result = graph.call_module(name, (arguments,))
            result.meta[META] = action
            for position, output in enumerate(segment.outputs):
                values[output] = graph.call_function(operator.getitem, (result, position))
                values[output].meta = dict(output.meta)
            if action.index in waited_on:
                call("computed", action)
        elif action.kind is Kind.REDUCE:
            parts = [(p, n) for p, n in segment.gradients if chunk_of[p] == action.chunk]
            contributions[action.index] = tuple(p for p, _ in parts)
            call("reduce", action, *(values[n] for _, n in parts))
        else:
            call(str(action.kind), action)

    output = source.graph.output_node()
    for node in output.all_input_nodes:
        if node.op == "get_attr":
            values[node] = graph.get_attr(str(node.target))
            modules[str(node.target)] = _attribute(source, str(node.target))
    graph.output(fx.map_arg(output.args[0], lambda n: values[n]))
    outer = fx.GraphModule(modules, graph, class_name="Step")
    graph.lint()
    return outer, contributions


def _label(method: str, action: Action) -> str:
    return method if action.chunk is None else f"{method}_chunk{action.chunk}"


def _attribute(module: torch.nn.Module, target: str) -> torch.nn.Module:
    value = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
