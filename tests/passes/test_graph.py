from __future__ import annotations

import operator

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.graph import META, MemoryNode, alias_root, is_memory, is_view, memory_nodes, nbytes
from tests.passes.graphs import Builder, aten


def test_memory_nodes_are_found_by_their_tag_in_order() -> None:
    b = Builder()
    x = b.input(4, 4)
    w1, w0 = b.fetch(1, 4, 4), b.fetch(0, 4, 4)
    y = b.call(aten.mm.default, b.call(aten.mm.default, x, w1), w0)
    r = b.reduce(y, 0)
    gm = b.output(y)
    assert [n.meta[META].parameter for n in memory_nodes(gm.graph, "fetch")] == [1, 0]
    assert memory_nodes(gm.graph, "reduce") == [r]
    assert is_memory(w0, "fetch") and not is_memory(w0, "reduce") and not is_memory(y, "fetch")
    assert r.meta[META] == MemoryNode("reduce", 0)


@pytest.mark.parametrize(
    ("target", "args", "view"),
    [
        (aten.permute.default, ([1, 0],), True),
        (aten.view.default, ([16],), True),
        (aten.slice.Tensor, (0, 1, 3), True),
        (aten._unsafe_view.default, ([16],), True),
        (aten.reshape.default, ([16],), True),
        (aten.contiguous.default, (), True),
        (aten.detach.default, (), True),
        (aten.clone.default, (), False),
        (aten.relu.default, (), False),
        (aten.add.Tensor, (1.0,), False),
    ],
)
def test_is_view_is_decided_by_the_schema(
    target: object, args: tuple[object, ...], view: bool
) -> None:
    b = Builder()
    x = b.input(4, 4)
    node = b.call(target, x, *args)
    assert is_view(node) is view
    assert alias_root(node) is (x if view else node)


def test_parts_of_a_split_are_views_and_those_of_a_fresh_tuple_are_not() -> None:
    b = Builder()
    x = b.input(4, 4)
    split = b.call(aten.split.Tensor, x, 2)
    part = b.call(operator.getitem, split, 1)
    deeper = b.call(aten.permute.default, part, [1, 0])
    normed = b.call(aten.native_layer_norm.default, x, [4], None, None, 1e-5)
    fresh = b.call(operator.getitem, normed, 0)
    assert is_view(part) and alias_root(deeper) is x
    assert not is_view(fresh) and alias_root(fresh) is fresh
    assert not is_view(x)


def test_nbytes_is_the_span_of_the_result() -> None:
    b = Builder()
    x = b.input(4, 6)
    assert nbytes(x) == 96
    assert nbytes(b.input(4, 6, dtype=torch.bfloat16)) == 48
    assert nbytes(b.input(0, 6)) == 0
    assert nbytes(b.input()) == 4
    assert nbytes(b.call(aten.expand.default, b.input(1, 6), [100, 6])) == 24
    # Columns 0..2 of 4 rows: the last element is at 3 * 6 + 2.
    assert nbytes(b.call(aten.slice.Tensor, x, 1, 0, 3)) == 21 * 4
    assert nbytes(b.call(aten.split.Tensor, x, 2)) == 96


def test_nbytes_keeps_symbols_and_adds_no_guards() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    b = Builder(mode)
    value = mode.from_tensor(torch.empty(5, 4), static_shapes=False)
    x = b.input(value=value)
    size = nbytes(x)
    symbols = sorted(size.free_symbols, key=str)
    assert len(symbols) == 2
    by_hint = dict(zip(symbols, (5, 4), strict=True))
    assert sympy.simplify(size.xreplace(by_hint)) == 80
    assert not env.guards
