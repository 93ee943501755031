"""Extract: a segment as a graph of its own, under canonical names.

In: a segment and the graph it was cut from. Out: a stand-alone GraphModule that takes the segment's
parameters and inputs and returns its outputs, and a fingerprint that is equal for segments that are
the same up to names: the equal layers of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.graph import META, is_memory
from passes.segments import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractedSegment:
    """A segment's graph: parameters first, then inputs, in; a tuple of the outputs, out."""

    module: fx.GraphModule
    fingerprint: str


def extract(
    segment: Segment, source: fx.GraphModule, parameter_values: Mapping[int, Any]
) -> ExtractedSegment:
    """Copy a segment out of ``source``.

    Args:
        segment: one of ``source``'s segments.
        source: the localized graph.
        parameter_values: the FakeTensor of each parameter.
    """
    graph = fx.Graph()
    describe = _Describer()
    parameters: dict[int, fx.Node] = {}
    values: dict[fx.Node, fx.Node] = {}
    for position, parameter in enumerate(segment.parameters):
        node = parameters[parameter] = graph.placeholder(f"primals_{position}")
        node.meta["val"] = parameter_values[parameter]
        describe.value("parameter", node)
    for position, outside in enumerate(segment.inputs):
        node = values[outside] = graph.placeholder(f"{_kind(outside)}_{position}")
        _copy_meta(outside, node)
        describe.value("input", node)
    constants: dict[str, Any] = {}
    for outside in segment.constants:
        name = f"constant{len(constants)}"
        constants[name] = _attribute(source, str(outside.target))
        values[outside] = graph.get_attr(name)
        _copy_meta(outside, values[outside])
        describe.constant(constants[name])

    def mapped(node: fx.Node) -> fx.Node:
        if is_memory(node, "fetch"):
            return parameters[node.meta[META].parameter]
        return values[node]

    for position, inner in enumerate(segment.nodes):
        node = graph.node_copy(inner, mapped)
        node.name = f"n{position}"
        node.meta = {}
        _copy_meta(inner, node)
        values[inner] = node
        describe.node(node)
    outputs = tuple(values[n] for n in segment.outputs)
    graph.output(outputs)
    describe.text(f"return {outputs}")
    return ExtractedSegment(
        module=fx.GraphModule(constants, graph, class_name="Segment"),
        fingerprint=describe.digest(),
    )


def _kind(outside: fx.Node) -> str:
    """The prefix of an input's name. Inductor tells by these prefixes which inputs a graph may
    free and which ones are generators; ``primals`` are held by the caller.
    """
    for kind in ("fwd_rng_state", "bwd_rng_state"):
        if outside.name.startswith(kind):
            return kind
    return "input"


def _copy_meta(old: fx.Node, new: fx.Node) -> None:
    for key in ("val", "tensor_meta"):
        if key in old.meta:
            new.meta[key] = old.meta[key]


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


class _Describer:
    """Collects a canonical text of a graph."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def text(self, line: str) -> None:
        self._lines.append(line)

    def value(self, kind: str, node: fx.Node) -> None:
        self.text(f"{kind} {node.name}: {self._describe(node.meta.get('val'))}")

    def node(self, node: fx.Node) -> None:
        arguments = fx.map_arg(node.args, lambda n: n)
        self.text(
            f"{node.name} = {node.op} {node.target} {self._plain(arguments)} "
            f"{self._plain(node.kwargs)}: {self._describe(node.meta.get('val'))}"
        )

    def constant(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() <= 4096:
            self.text(f"constant {value.dtype} {tuple(value.shape)} {value.tolist()}")
        else:
            self.text(f"constant {id(value)}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self._lines).encode()).hexdigest()

    def _plain(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {self._plain(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self._plain(v) for v in value) + "]"
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return repr(value)

    def _describe(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            size = ", ".join(self._size(s) for s in value.shape)
            stride = ", ".join(self._size(s) for s in value.stride())
            offset = self._size(value.storage_offset())
            return f"{value.dtype}[{size}][{stride}]+{offset} {value.device}"
        if isinstance(value, list | tuple):
            return "(" + "; ".join(self._describe(v) for v in value) + ")"
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if isinstance(value, torch.Generator):
            # Each checkpointed layer has a generator object of its own.
            return f"generator {value.device}"
        return repr(value)

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        return str(size.node.expr)
