from __future__ import annotations

import operator
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.graph import META, is_memory
from passes.lifetimes import lifetimes
from passes.liveness import Live, evaluate, liveness
from passes.localize import localize
from passes.segments import Segment, split
from tests.passes.graphs import Builder, aten, real_inputs, real_parameters
from tests.passes.random_graphs import Drawn, graphs

TILE = 4 * 4 * 4
"""Bytes of a 4 x 4 float32 tensor."""


def _split(gm: fx.GraphModule, chunk_of: dict[int, int]) -> tuple[Segment, ...]:
    localize(gm)
    return split(lifetimes(gm.graph), chunk_of, graph=gm.graph)


def _live(gm: fx.GraphModule, chunk_of: dict[int, int]) -> tuple[Live, ...]:
    segments = _split(gm, chunk_of)
    return liveness(segments, (), gm.graph, None, saved={}, symbols={})


def test_a_chain_holds_its_input_and_two_values_at_a_time() -> None:
    b = Builder()
    x = b.input(4, 4)
    for _ in range(5):
        x = b.call(aten.relu.default, x)
    (live,) = _live(b.output(x), {})
    assert live == Live(held=TILE, own=2 * TILE, dying=())
    assert live.peak == 3 * TILE


def test_a_value_dies_inside_the_last_segment_that_reads_it() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    c = b.call(aten.mm.default, a, b.fetch(1, 4, 4))
    d = b.call(aten.mm.default, c, b.fetch(2, 4, 4))
    e = b.call(aten.add.Tensor, d, a)
    lives = _live(b.output(e), {0: 0, 1: 1, 2: 2})
    assert lives[0] == Live(held=TILE, own=TILE, dying=())
    assert lives[1] == Live(held=2 * TILE, own=TILE, dying=())
    # c, then a; both die here, and e is the third of d, a and e.
    assert sorted(lives[2].dying) == [(0, TILE), (1, TILE)]
    assert lives[2] == Live(held=TILE, own=3 * TILE, dying=lives[2].dying)


def test_views_share_their_roots_storage() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.relu.default, x)
    t = b.call(aten.permute.default, a, [1, 0])
    y = b.call(aten.relu.default, t)
    z = b.call(aten.add.Tensor, y, t)
    (live,) = _live(b.output(z), {})
    assert live.own == 3 * TILE


def test_weights_and_anchors_count_nothing() -> None:
    b = Builder()
    x = b.input(4, 4)
    t = b.call(aten.permute.default, b.fetch(0, 4, 4), [1, 0])
    y = b.call(aten.mm.default, x, t)
    (live,) = _live(b.output(y), {0: 0})
    assert live == Live(held=TILE, own=TILE, dying=())


def test_what_leaves_the_graph_stays_to_the_end_and_a_gradient_to_the_end_of_its_segment() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    g = b.call(aten.relu.default, a)
    h = b.call(aten.relu.default, a)
    i = b.call(aten.relu.default, h)
    c = b.call(aten.mm.default, i, b.fetch(1, 4, 4))
    b.reduce(g, 0)
    lives = _live(b.output(c, a), {0: 0, 1: 1})
    assert lives[0] == Live(held=TILE, own=4 * TILE, dying=())
    assert lives[1] == Live(held=2 * TILE, own=2 * TILE, dying=((0, TILE),))


def test_a_multi_output_op_counts_each_of_its_results_once() -> None:
    b = Builder()
    x = b.input(4, 4)
    outputs = b.call(aten.native_layer_norm.default, x, [4], None, None, 1e-5)
    y = b.call(operator.getitem, outputs, 0)
    rstd = b.call(operator.getitem, outputs, 2)
    z = b.call(aten.mul.Tensor, y, rstd)
    (live,) = _live(b.output(z), {})
    # y, rstd and the unused mean (4 floats each) while the op runs; then y, rstd and z.
    assert live.own == 2 * TILE + 4 * 4


def test_a_step_keeps_what_the_forward_saves_until_its_last_use() -> None:
    b = Builder()
    x = b.input(4, 4)
    a = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    c = b.call(aten.mm.default, a, b.fetch(1, 4, 4))
    forward = b.output(c, a)
    d = Builder(b.mode)
    saved, tangent = d.input(4, 4), d.input(4, 4)
    g1 = d.call(aten.mm.default, saved, tangent)
    d.reduce(g1, 1)
    back = d.call(aten.mm.default, tangent, d.fetch(1, 4, 4))
    last = d.call(aten.mm.default, back, d.fetch(0, 4, 4))
    backward = d.output(last)
    chunks = {0: 0, 1: 1}
    forwards, backwards = _split(forward, chunks), _split(backward, chunks)
    lives = liveness(
        forwards, backwards, forward.graph, backward.graph, saved={saved: a}, symbols={}
    )
    # x is the caller's; c is returned and stays for the whole step.
    assert lives[0] == Live(held=TILE, own=TILE, dying=())
    assert lives[1] == Live(held=2 * TILE, own=TILE, dying=())
    # Held: x, c and g1's segment; dying: a and the tangent.
    assert lives[2].held == 2 * TILE
    assert sorted(n for _, n in lives[2].dying) == [TILE, TILE]
    assert lives[2].own == 3 * TILE
    assert lives[3] == Live(held=2 * TILE, own=2 * TILE, dying=((0, TILE),))


def test_symbolic_sizes_are_evaluated_for_any_value() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    b = Builder(mode)
    value = mode.from_tensor(torch.empty(6, 4), static_shapes=False)
    size = b.input(value=value.shape[0])
    other = b.input(value=value.shape[1])
    x = b.input(value=value)
    y = b.call(aten.relu.default, b.call(aten.relu.default, x))
    gm = b.output(y)
    segments = _split(gm, {})
    rows, columns = (n.meta["val"].node.expr for n in (size, other))
    for n in (3, 10):
        (live,) = liveness(segments, (), gm.graph, None, saved={}, symbols={rows: n, columns: 5})
        assert live == Live(held=20 * n, own=40 * n, dying=())


def test_a_size_that_depends_on_data_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the data"):
        evaluate(sympy.Symbol("u0") * 4, {})
    assert evaluate(12, {}) == 12


class _Brute:
    """Executes the nodes for real and asks, node by node, which storages somebody still needs."""

    def __init__(self, gm: fx.GraphModule, segments: tuple[Segment, ...]) -> None:
        self.env: dict[fx.Node, Any] = {}
        inputs = real_inputs(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameters = real_parameters(gm)
        anchors = set()
        for node in gm.graph.nodes:
            if is_memory(node, "fetch"):
                self.env[node] = parameters[node.meta[META].parameter]
                anchors.add(node.args[0])
            elif is_memory(node, "reduce"):
                anchors.add(node.args[1])
        self.env.update(zip(placeholders, inputs, strict=True))
        order = [(m, n) for m, s in enumerate(segments) for n in s.nodes]
        for _, node in order:
            arguments = fx.map_arg(node.args, lambda n: self.env[n])
            self.env[node] = node.target(*arguments)

        weights = {id(p.untyped_storage()): p for p in parameters.values()}
        weight_keys = {p.untyped_storage()._cdata for p in weights.values()}
        self.size: dict[int, int] = {}
        needed: dict[int, list[int]] = {}  # storage -> first and last step that needs it
        for step, (_, node) in enumerate(order):
            for storage in self.storages(node):
                needed.setdefault(storage, [step, step])[1] = step
            for source in node.all_input_nodes:
                for storage in self.storages(source):
                    if storage in needed:
                        needed[storage][1] = step
        last_step = {m: max(i for i, (k, _) in enumerate(order) if k == m) for m, _ in order}
        for moment, segment in enumerate(segments):
            for _, node in segment.gradients:
                for storage in self.storages(node):
                    if storage in needed:
                        needed[storage][1] = max(needed[storage][1], last_step[moment])
        for node in gm.graph.output_node().all_input_nodes:
            for storage in self.storages(node):
                if storage in needed:
                    needed[storage][1] = len(order)
        callers = {
            s for p in placeholders if p not in anchors and p.users for s in self.storages(p)
        } | {s for p in placeholders if not p.users for s in self.storages(p)}
        for storage in weight_keys | callers:
            needed.pop(storage, None)
        whole = sum(self.size[s] for s in callers)
        self.peaks = [whole] * len(segments)
        for step, (moment, _) in enumerate(order):
            alive = sum(self.size[s] for s, (a, z) in needed.items() if a <= step <= z)
            self.peaks[moment] = max(self.peaks[moment], whole + alive)
        for moment, segment in enumerate(segments):
            if not segment.nodes:  # it runs nothing, but what crosses it is alive
                border = sum(len(s.nodes) for s in segments[:moment])
                crossing = sum(self.size[s] for s, (a, z) in needed.items() if a < border <= z)
                self.peaks[moment] = whole + crossing

    def storages(self, node: fx.Node) -> list[int]:
        value = self.env[node]
        tensors = [value] if isinstance(value, Tensor) else list(value)
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.size[storage._cdata] = storage.nbytes()
            found.append(storage._cdata)
        return found


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_peaks_equal_those_of_an_execution_that_tracks_storages(drawn: Drawn) -> None:
    segments = _split(drawn.gm, drawn.chunk_of)
    lives = liveness(segments, (), drawn.gm.graph, None, saved={}, symbols={})
    assert [live.peak for live in lives] == _Brute(drawn.gm, segments).peaks, drawn.gm.code
