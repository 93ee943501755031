from __future__ import annotations

from passes.lifetimes import lifetimes
from passes.localize import localize
from tests.passes.graphs import Builder, aten


def test_uses_and_gradients_by_position() -> None:
    b = Builder()
    x = b.input(4, 4)
    w0, w1 = b.fetch(0, 4, 4), b.fetch(1, 4, 4)
    t = b.call(aten.permute.default, w0, [1, 0])
    a = b.call(aten.mm.default, x, t)  # 0
    c = b.call(aten.relu.default, a)  # 1
    d = b.call(aten.mm.default, c, w1)  # 2
    e = b.call(aten.addmm.default, d, w0, w1)  # 3
    b.reduce(c, 0)
    b.reduce(e, 1)
    b.reduce(x, 0)
    b.reduce(b.call(aten.permute.default, c, [1, 0]), 0)  # 4: a view of an activation
    gm = localize(b.output(d))
    found = lifetimes(gm.graph)
    assert list(found.nodes) == [a, c, d, e, e.next.next.next.next]
    assert list(found.uses) == [{0}, set(), {1}, {0, 1}, set()]
    assert [(p, q) for p, q, _ in found.gradients] == [(1, 0), (3, 1), (-1, 0), (4, 0)]
    assert found.gradients[2][2] is x


def test_a_graph_without_parameters_has_no_uses() -> None:
    b = Builder()
    x = b.input(4, 4)
    y = b.call(aten.relu.default, x)
    found = lifetimes(b.output(y).graph)
    assert found.nodes == (y,) and found.uses == (frozenset(),) and found.gradients == ()


def test_the_clone_of_a_returned_parameter_is_a_use() -> None:
    b = Builder()
    w = b.fetch(3, 4)
    found = lifetimes(localize(b.output(w)).graph)
    assert found.uses == (frozenset({3}),)
