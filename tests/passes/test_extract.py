from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx

from passes.extract import ExtractedSegment, extract
from passes.lifetimes import lifetimes
from passes.localize import localize
from passes.segments import split
from tests.passes.graphs import (
    Builder,
    Reference,
    aten,
    fake_parameters,
    real_inputs,
    real_parameters,
)
from tests.passes.random_graphs import graphs


def _extract(gm: fx.GraphModule, chunk_of: dict[int, int]) -> list[ExtractedSegment]:
    localize(gm)
    values = fake_parameters(gm)
    segments = split(lifetimes(gm.graph), chunk_of, graph=gm.graph)
    return [extract(s, gm, values) for s in segments]


def _layer(b: Builder, x: fx.Node, number: int, **changed: Any) -> fx.Node:
    dtype = changed.get("dtype", torch.float32)
    w = b.fetch(2 * number, 8, 8, dtype=dtype)
    bias = b.fetch(2 * number + 1, 8, dtype=dtype)
    if changed.get("transposed", True):
        w = b.call(aten.permute.default, w, [1, 0])
    y = b.call(aten.addmm.default, bias, x, w)
    y = b.call(aten.mul.Tensor, y, changed.get("factor", 2.0))
    return b.call(changed.get("op", aten.relu.default), y)


def test_equal_layers_have_equal_fingerprints_whatever_their_names() -> None:
    b = Builder()
    x = b.input(4, 8)
    for number in range(3):
        x = _layer(b, x, number)
        x.name = f"anything_{7 - number}"
    found = _extract(b.output(x), {p: p // 2 for p in range(6)})
    assert len(found) == 3
    assert len({e.fingerprint for e in found}) == 1
    placeholders = [n.name for n in found[2].module.graph.find_nodes(op="placeholder")]
    assert placeholders == ["primals_0", "primals_1", "input_0"]


@pytest.mark.parametrize(
    "changed",
    [
        {"factor": 3.0},
        {"factor": 2},
        {"op": aten.sigmoid.default},
        {"transposed": False},
    ],
    ids=str,
)
def test_layers_that_differ_have_different_fingerprints(changed: dict[str, Any]) -> None:
    b = Builder()
    x = b.input(4, 8)
    y = _layer(b, x, 0)
    z = _layer(b, y, 1, **changed)
    first, second = _extract(b.output(z), {0: 0, 1: 0, 2: 1, 3: 1})
    assert first.fingerprint != second.fingerprint


def _one(make: Any) -> str:
    b = Builder()
    return _extract(b.output(make(b)), {})[0].fingerprint


def test_dtype_shape_stride_and_constants_are_part_of_the_fingerprint() -> None:
    def input_of(dtype: torch.dtype, *shape: int) -> Any:
        return lambda b: b.call(aten.relu.default, b.input(*shape, dtype=dtype))

    def strided(stride: tuple[int, int]) -> Any:
        def make(b: Builder) -> fx.Node:
            with b.mode:
                value = torch.empty_strided((4, 4), stride)
            return b.call(aten.relu.default, b.input(value=value))

        return make

    def constant(value: Tensor) -> Any:
        return lambda b: b.call(aten.add.Tensor, b.input(4, 4), b.constant(value))

    variants = [
        input_of(torch.float32, 4, 8),
        input_of(torch.bfloat16, 4, 8),
        input_of(torch.float32, 8, 4),
        input_of(torch.float32, 4, 4),
        strided((1, 4)),
        strided((8, 1)),
        constant(torch.ones(4)),
        constant(torch.full((4,), 2.0)),
        constant(torch.ones(4, dtype=torch.float64)),
    ]
    assert len({_one(v) for v in variants}) == len(variants)
    assert _one(constant(torch.ones(4))) == _one(constant(torch.ones(4)))


def test_large_constants_never_share_code_unless_they_are_the_same_tensor() -> None:
    ones, other = torch.ones(5000), torch.ones(5000)
    other[4999] = 2.0

    def make(value: Tensor) -> Any:
        return lambda b: b.call(aten.add.Tensor, b.input(5000), b.constant(value))

    kept = [ones, other]
    assert _one(make(kept[0])) != _one(make(kept[1]))


def test_order_of_outputs_and_which_values_leave_matter() -> None:
    def make(swap: bool, both: bool) -> str:
        b = Builder()
        x = b.input(4, 4)
        y = b.call(aten.relu.default, x)
        z = b.call(aten.sigmoid.default, y)
        gm = b.output(*((z, y) if both else (z,)))
        return _extract(gm, {})[0].fingerprint

    assert make(False, True) != make(False, False)


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_segments_in_order_equal_the_whole_graph_bit_for_bit(drawn: Any) -> None:
    gm, chunk_of = drawn.gm, drawn.chunk_of
    inputs, parameters = real_inputs(gm), real_parameters(gm)
    reference = Reference(copy.deepcopy(gm), parameters)
    expected = reference.run(*[i.clone() for i in inputs])

    localize(gm)
    values = fake_parameters(gm)
    segments = split(lifetimes(gm.graph), chunk_of, graph=gm.graph)
    env: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    reduced: list[tuple[int, Tensor]] = []
    for segment in segments:
        module = extract(segment, gm, values).module
        arguments = [parameters[p] for p in segment.parameters]
        arguments += [env[n] for n in segment.inputs]
        for node, value in zip(segment.outputs, module(*arguments), strict=True):
            env[node] = value
        reduced += [(p, env[n].clone()) for p, n in segment.gradients]
    found = fx.map_arg(gm.graph.output_node().args[0], lambda n: env[n])
    for e, f in zip(expected, found, strict=True):
        assert torch.equal(e, f)

    def by_parameter(pairs: list[tuple[int, Tensor]]) -> dict[int, list[Tensor]]:
        return {p: [t for q, t in pairs if q == p] for p, _ in pairs}

    left, right = by_parameter(reference.reduced), by_parameter(reduced)
    assert left.keys() == right.keys()
    for parameter, tensors in left.items():
        assert len(tensors) == len(right[parameter])
        # Contributions of one parameter may be complete in another order than they are reduced.
        for tensor in tensors:
            assert any(torch.equal(tensor, other) for other in right[parameter])
