from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.lifetimes import lifetimes
from passes.localize import localize
from passes.segments import Segment, split
from tests.passes.graphs import Builder, aten


def _split(gm: fx.GraphModule, chunk_of: dict[int, int]) -> tuple[Segment, ...]:
    localize(gm)
    return split(lifetimes(gm.graph), chunk_of, graph=gm.graph)


def test_a_segment_starts_where_another_chunk_is_read() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.mm.default, x, b.fetch(1, 4, 4))
    c = b.call(aten.mm.default, a, b.fetch(2, 4, 4))
    d = b.call(aten.relu.default, c)
    e = b.call(aten.mm.default, d, b.fetch(3, 4, 4))
    first, second = _split(b.output(e, a), {1: 0, 2: 0, 3: 1})
    assert first.nodes == (a, c, d) and second.nodes == (e,)
    assert (first.needs, second.needs) == ((0,), (1,))
    assert (first.parameters, second.parameters) == ((1, 2), (3,))
    assert (first.inputs, second.inputs) == ((x,), (d,))
    assert (first.outputs, second.outputs) == ((a, d), (e,))
    assert (first.index, second.index) == (0, 1)


def test_without_paged_parameters_there_is_one_segment() -> None:
    b = Builder()
    x = b.input(4, 4)
    y = b.call(aten.mm.default, b.call(aten.mm.default, x, b.fetch(0, 4, 4)), b.fetch(1, 4, 4))
    (only,) = _split(b.output(y), {})
    assert only.needs == () and only.parameters == (0, 1) and len(only.nodes) == 2


def test_a_node_reading_two_chunks_needs_both_and_a_subset_starts_nothing() -> None:
    b = Builder()
    x = b.input(4, 4)
    w, bias = b.fetch(0, 4, 4), b.fetch(1, 4)
    y = b.call(aten.addmm.default, bias, x, w)
    z = b.call(aten.mm.default, y, w)
    z = b.call(aten.add.Tensor, z, bias)
    (only,) = _split(b.output(z), {0: 0, 1: 1})
    assert only.needs == (0, 1)


def test_leading_nodes_without_parameters_join_the_first_segment() -> None:
    b = Builder()
    x = b.input(4, 4)
    y = b.call(aten.relu.default, x)
    z = b.call(aten.mm.default, y, b.fetch(0, 4, 4))
    (only,) = _split(b.output(z), {0: 0})
    assert only.nodes == (y, z)


def test_views_of_parameters_belong_to_their_consumer() -> None:
    b = Builder()
    x = b.input(4, 4)
    w0, w1 = b.fetch(0, 4, 4), b.fetch(1, 4, 4)
    t0 = b.call(aten.permute.default, w0, [1, 0])
    t1 = b.call(aten.view.default, b.call(aten.permute.default, w1, [1, 0]), [4, 4])
    y = b.call(aten.mm.default, x, t0)
    z = b.call(aten.mm.default, y, t1)
    z = b.call(aten.mm.default, z, t0)
    segments = _split(b.output(z), {0: 0, 1: 1})
    assert [s.needs for s in segments] == [(0,), (1,), (0,)]
    assert [len(s.nodes) for s in segments] == [2, 3, 2]
    assert all(s.parameters == s.needs for s in segments)


def test_gradients_are_complete_with_the_segment_of_their_producer() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    g = b.call(aten.relu.default, a)
    c = b.call(aten.mm.default, g, b.fetch(1, 4, 4))
    b.reduce(c, 1)
    b.reduce(g, 0)
    b.reduce(x, 2)
    first, second = _split(b.output(a), {0: 0, 1: 1})
    assert first.gradients == ((0, g), (2, x))
    assert second.gradients == ((1, c),)
    assert c in second.outputs and g in first.outputs


def test_constants_are_apart_from_inputs() -> None:
    b = Builder()
    x = b.input(4, 4)
    k = b.constant(torch.ones(4))
    y = b.call(aten.add.Tensor, x, k)
    (only,) = _split(b.output(y), {})
    assert only.constants == (k,) and only.inputs == (x,)


def test_a_symbolic_size_becomes_an_input() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    b = Builder(mode)
    value = mode.from_tensor(torch.empty(6, 4), static_shapes=False)
    size = b.input(value=value.shape[0])
    b.input(value=value.shape[1])
    x = b.input(value=value)
    y = b.call(aten.relu.default, x)
    (only,) = _split(b.output(y), {})
    assert only.inputs[0] is x and size in only.inputs
