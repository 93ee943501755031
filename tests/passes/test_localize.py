from __future__ import annotations

import copy

import torch

from passes.graph import META, is_memory, is_view, memory_nodes
from passes.localize import localize
from tests.passes.graphs import (
    Builder,
    Reference,
    aten,
    real_inputs,
    real_parameters,
    targets,
)


def test_each_consumer_gets_its_own_view_and_outputs_are_clones() -> None:
    b = Builder()
    x = b.input(4, 4)
    w = b.fetch(0, 4, 4)
    t = b.call(aten.permute.default, w, [1, 0])
    a = b.call(aten.relu.default, x)
    y = b.call(aten.mm.default, a, t)
    z = b.call(aten.mm.default, y, t)
    gm = localize(b.output(z, t))
    assert targets([n for n in gm.graph.nodes if n.op == "call_function"]) == [
        "fetch", "relu", "permute", "mm", "permute", "mm", "permute", "clone",
    ]  # fmt: skip
    for node in gm.graph.nodes:
        if is_view(node):
            assert len(node.users) == 1
            assert node.next in node.users, "a view stands right before its consumer"
    output = gm.graph.output_node().args[0]
    assert output[1].target is aten.clone.default


def test_fetches_of_one_parameter_become_one_at_the_top() -> None:
    b = Builder()
    x = b.input(4, 4)
    y = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    z = b.call(aten.mm.default, y, b.fetch(1, 4, 4))
    z = b.call(aten.mm.default, z, b.fetch(0, 4, 4))
    gm = localize(b.output(z))
    fetches = memory_nodes(gm.graph, "fetch")
    assert [n.meta[META].parameter for n in fetches] == [0, 1]
    nodes = list(gm.graph.nodes)
    placeholders = sum(n.op == "placeholder" for n in nodes)
    assert nodes[placeholders : placeholders + 2] == fetches


def test_a_chain_of_views_is_copied_whole_and_a_cast_is_no_view() -> None:
    b = Builder()
    x = b.input(2, 8)
    w = b.fetch(0, 4, 4)
    flat = b.call(aten.view.default, w, [2, 8])
    turned = b.call(aten.permute.default, flat, [1, 0])
    y = b.call(aten.mm.default, x, turned)
    z = b.call(aten.add.Tensor, b.call(aten.mm.default, x, turned), y)
    gm = localize(b.output(z, flat))
    assert targets([n for n in gm.graph.nodes if n.op == "call_function"]) == [
        "fetch", "view", "permute", "mm", "view", "permute", "mm", "add", "view", "clone",
    ]  # fmt: skip


def test_a_consumer_of_two_views_of_one_parameter_shares_the_chain() -> None:
    b = Builder()
    w = b.fetch(0, 4, 4)
    t = b.call(aten.permute.default, w, [1, 0])
    u = b.call(aten.permute.default, t, [1, 0])
    b.input(1)
    y = b.call(aten.mm.default, t, u)
    gm = localize(b.output(y))
    assert targets([n for n in gm.graph.nodes if n.op == "call_function"]) == [
        "fetch", "permute", "permute", "mm",
    ]  # fmt: skip


def test_a_returned_parameter_is_cloned() -> None:
    b = Builder()
    w = b.fetch(0, 4, 4)
    gm = localize(b.output(w))
    (out,) = gm.graph.output_node().args[0]
    assert out.target is aten.clone.default and is_memory(out.args[0], "fetch")


def test_a_graph_without_fetches_is_left_alone() -> None:
    b = Builder()
    x = b.input(4, 4)
    t = b.call(aten.permute.default, x, [1, 0])
    gm = b.output(b.call(aten.mm.default, x, t), t)
    before = [(n.name, n.args) for n in gm.graph.nodes]
    localize(gm)
    assert [(n.name, n.args) for n in gm.graph.nodes] == before


def test_localizing_changes_no_result_and_twice_is_once() -> None:
    b = Builder()
    x = b.input(4, 4)
    w, v = b.fetch(0, 4, 4), b.fetch(1, 4)
    t = b.call(aten.permute.default, w, [1, 0])
    y = b.call(aten.addmm.default, v, x, t)
    z = b.call(aten.mm.default, y, b.call(aten.permute.default, t, [1, 0]))
    gm = b.output(z, t, v)
    inputs, parameters = real_inputs(gm), real_parameters(gm)
    expected = Reference(copy.deepcopy(gm), parameters).run(*inputs)
    localize(gm)
    found = Reference(gm, parameters).run(*inputs)
    assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
    code = targets(list(gm.graph.nodes))
    localize(gm)
    assert targets(list(gm.graph.nodes)) == code
