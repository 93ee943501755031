"""Small graphs by hand: fetch and reduce nodes tagged as capture tags them, with FakeTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.graph import META, MemoryNode, memory_nodes
from pstar_compile import ops

aten = torch.ops.aten


class Builder:
    """Writes an FX graph node by node; every node gets the FakeTensor that its op makes."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or FakeTensorMode()
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self._anchors: dict[int, fx.Node] = {}

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, value: Any = None) -> fx.Node:
        name = f"x{len(self.graph.nodes)}"
        earlier = self.graph.find_nodes(op="placeholder")
        if earlier:
            with self.graph.inserting_after(earlier[-1]):
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_before():
                node = self.graph.placeholder(name)
        if value is None:
            with self.mode:
                value = torch.empty(shape, dtype=dtype)
        node.meta["val"] = value
        return node

    def anchor(self, parameter: int) -> fx.Node:
        if parameter not in self._anchors:
            self._anchors[parameter] = self.input(1)
        return self._anchors[parameter]

    def constant(self, value: Tensor) -> fx.Node:
        name = f"constant{len(self.graph.nodes)}"
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def fetch(self, parameter: int, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.call_function(ops.FETCH, (self.anchor(parameter), list(shape)))
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        node.meta[META] = MemoryNode("fetch", parameter)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(
                *fx.map_arg(args, lambda n: n.meta["val"]),
                **fx.map_arg(kwargs, lambda n: n.meta["val"]),
            )
        return node

    def reduce(self, grad: fx.Node, parameter: int) -> fx.Node:
        node = self.graph.call_function(ops.REDUCE, (grad, self.anchor(parameter)))
        node.meta["val"] = self.anchor(parameter).meta["val"]
        node.meta[META] = MemoryNode("reduce", parameter)
        return node

    def output(self, *values: Any) -> fx.GraphModule:
        self.graph.output(tuple(values))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)


def fake_parameters(gm: fx.GraphModule) -> dict[int, Tensor]:
    return {n.meta[META].parameter: n.meta["val"] for n in memory_nodes(gm.graph, "fetch")}


class Reference(fx.Interpreter):
    """Runs a captured graph whole; keeps what it reduced."""

    def __init__(self, gm: fx.GraphModule, parameters: dict[int, Tensor]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.parameters = parameters
        self.reduced: list[tuple[int, Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        memory = n.meta.get(META)
        if memory is None:
            return super().run_node(n)
        if memory.op == "fetch":
            return self.parameters[memory.parameter]
        grad = self.env[n.args[0]]
        self.reduced.append((memory.parameter, grad.clone()))
        return torch.zeros(1)


def real_inputs(gm: fx.GraphModule, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tuple(n.meta["val"].shape), generator=generator).to(n.meta["val"].dtype)
        for n in gm.graph.find_nodes(op="placeholder")
    ]


def real_parameters(gm: fx.GraphModule, seed: int = 1) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p: torch.randn(tuple(v.shape), generator=generator).to(v.dtype)
        for p, v in sorted(fake_parameters(gm).items())
    }


def targets(nodes: Sequence[fx.Node]) -> list[str]:
    """The nodes' ops by bare name, for comparing with an expected list."""
    return [
        n.target._schema.name.split("::")[1]
        if isinstance(n.target, torch._ops.OpOverload)
        else n.op
        for n in nodes
    ]
