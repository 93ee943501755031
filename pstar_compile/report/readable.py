"""The annotated graph: the outer graph's code with a comment behind each memory node."""

from __future__ import annotations

import operator
import time

import torch
from torch import fx

from passes.graph import META
from passes.plan import Action, Direction, Home, Kind, StepPlan
from pstar_compile.config import format_bytes


def readable(graph: fx.GraphModule, plan: StepPlan, direction: Direction) -> str:
    """The outer graph of one direction as annotated Python.

    Every memory node says its chunk, bytes, moment, and from where to where it moves; every
    segment call its moment, the chunks it reads, and the non-model bytes alive around it.
    """
    started = time.perf_counter()
    memory_nodes = 0
    lines = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is operator.getitem:
            continue
        comment = ""
        action = node.meta.get(META)
        if isinstance(action, Action):
            memory_nodes += action.kind is not Kind.COMPUTE
            comment = "  # " + _comment(str(node.target), action, plan)
        lines.append(f"    {_statement(node)}{comment}")
    inputs = [n.name for n in graph.graph.find_nodes(op="placeholder")][1:]
    result = fx.node.map_arg(graph.graph.output_node().args[0], _name_node)
    header = [
        f"# {direction} graph of a step plan, written by pass insert, torch {torch.__version__}",
        f"# {memory_nodes} memory nodes, {format_bytes(plan.h2d_bytes)} in and "
        f"{format_bytes(plan.d2h_bytes)} out per step, predicted device peak "
        f"{_of_limit(plan.peak_device_bytes, plan.budget_bytes)}, arena "
        f"{_of_limit(plan.schedule.arena_bytes, plan.arena_limit)}; rendered in "
        f"{(time.perf_counter() - started) * 1e3:.1f} ms",
        f"def {direction}(run, {', '.join(inputs)}):",
    ]
    return "\n".join([*header, *lines, f"    return {result}"]) + "\n"


def _of_limit(nbytes: int, limit: int | None) -> str:
    return format_bytes(nbytes) + ("" if limit is None else f" of {format_bytes(limit)}")


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"{source.name}[{index}]"
    return node.name


def _name_node(node: fx.Node) -> fx.node.Argument:
    return _Name(_name(node))


def _statement(node: fx.Node) -> str:
    arguments = [_name(a) if isinstance(a, fx.Node) else repr(a) for a in node.args]
    if node.op == "call_module":
        return f"{node.name} = self.{node.target}({', '.join(arguments)})"
    call = f"run.{node.target}({', '.join(arguments[1:])})"
    return f"{node.name} = {call}" if node.users else call


def _comment(target: str, action: Action, plan: StepPlan) -> str:
    moment = f"moment {action.moment}"
    if action.kind is Kind.COMPUTE:
        facts = plan.moments[action.moment]
        if target == "arguments":
            live = format_bytes(facts.live_bytes)
            return f"{moment}: views of chunks {list(facts.needs)}, {live} non-model peak"
        if target == "computed":
            return f"{moment}: later copies wait for this point"
        return f"{moment}, {facts.seconds * 1e3:.2f} ms predicted"
    assert action.chunk is not None
    chunk = plan.chunks[action.chunk]
    what = f"chunk {chunk.index}, {format_bytes(chunk.nbytes)}, {moment}"
    if action.kind is Kind.FETCH:
        needed = _first_need(action, plan)
        return f"{what}: host -> device @{action.offset}, needed at moment {needed}"
    if action.kind is Kind.WAIT:
        return f"{what}: compute waits for the fetch"
    if action.kind is Kind.RELEASE:
        return f"{what}: not read again from here"
    if action.kind is Kind.REDUCE and chunk.home is Home.DEVICE:
        return f"{what}: gradient stays on the device"
    if action.kind is Kind.DISCARD:
        return f"{what}: compute waits for the offload, the gradient's memory is free"
    if action.offset is None:
        return f"{what}: gradient {'complete' if action.kind is Kind.REDUCE else '-> host'}"
    if action.kind is Kind.REDUCE:
        return f"{what}: gradient -> device @{action.offset}"
    return f"{what}: gradient device @{action.offset} -> host"


def _first_need(fetch: Action, plan: StepPlan) -> int | str:
    for action in plan.schedule.actions[fetch.index :]:
        if action.kind is Kind.COMPUTE and fetch.chunk in plan.moments[action.moment].needs:
            return action.moment
    return "-"
