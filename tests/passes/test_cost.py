from __future__ import annotations

import pytest
import torch

from passes.cost import node_flops, segment_seconds
from passes.lifetimes import lifetimes
from passes.localize import localize
from passes.plan import Rates
from passes.segments import split
from tests.passes.graphs import Builder, aten

RATES = Rates(
    update_device=1e9,
    update_host=1e8,
    cast_host=1e9,
    flops={torch.float32: 1000.0, torch.bfloat16: 4000.0},
    memory=100.0,
    h2d=1.0,
    d2h=1.0,
)


def test_flops_follow_torchs_formulas() -> None:
    b = Builder()
    x, y = b.input(3, 5), b.input(5, 7)
    assert node_flops(b.call(aten.mm.default, x, y)) == 2 * 3 * 5 * 7
    assert node_flops(b.call(aten.addmm.default, b.input(7), x, y)) == 2 * 3 * 5 * 7
    assert node_flops(b.call(aten.relu.default, x)) == 0
    assert node_flops(b.call(aten.permute.default, x, [1, 0])) == 0
    image, kernel = b.input(2, 3, 8, 8), b.input(4, 3, 3, 3)
    conv = b.call(
        aten.convolution.default, image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    assert node_flops(conv) == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert node_flops(x) == 0


def _seconds(b: Builder, *outputs: torch.fx.Node) -> float:
    gm = localize(b.output(*outputs))
    (segment,) = split(lifetimes(gm.graph), {}, graph=gm.graph)
    return segment_seconds(segment, RATES)


def test_elementwise_work_costs_what_enters_and_leaves() -> None:
    b = Builder()
    x = b.input(10, 10)
    y = b.call(aten.relu.default, b.call(aten.relu.default, b.call(aten.relu.default, x)))
    assert _seconds(b, y) == pytest.approx((400 + 400) / RATES.memory)


def test_a_matmul_costs_the_longer_of_its_operations_and_bytes() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(10, 10), b.input(10, 10))
    compute = 2000 / RATES.flops[torch.float32]
    moved = 1200 / RATES.memory
    assert _seconds(b, y) == pytest.approx(max(compute, moved) + (1200 + 400) / RATES.memory)


def test_lower_precision_is_faster_and_unknown_dtypes_have_a_rate() -> None:
    def mm(dtype: torch.dtype) -> float:
        b = Builder()
        x = b.input(100, 1000, dtype=dtype)
        return _seconds(b, b.call(aten.mm.default, x, b.input(1000, 100, dtype=dtype)))

    assert mm(torch.bfloat16) < mm(torch.float32)
    assert mm(torch.float64) > 0
