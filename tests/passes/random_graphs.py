"""Random small captured graphs for property tests."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from hypothesis import strategies as st
from torch import fx

from tests.passes.graphs import Builder, aten

PARAMETERS = 4


@dataclass(frozen=True)
class Drawn:
    gm: fx.GraphModule
    chunk_of: dict[int, int]


@st.composite
def graphs(draw: st.DrawFn) -> Drawn:
    """A graph over 4 x 4 tensors: matmuls with parameters and views of them, elementwise ops,
    views, multi-output ops, several outputs (some of them views or parameters), and reduces."""
    b = Builder()
    values = [b.input(4, 4), b.input(4, 4)]
    for parameter in range(PARAMETERS):
        b.anchor(parameter)
    pick = st.integers(0, 10**6)

    def value() -> fx.Node:
        return values[draw(pick) % len(values)]

    def parameter() -> int:
        return draw(st.integers(0, PARAMETERS - 1))

    def mm() -> fx.Node:
        w = b.fetch(parameter(), 4, 4)
        if draw(st.booleans()):
            w = b.call(aten.permute.default, w, [1, 0])
        return b.call(aten.mm.default, value(), w)

    def scaled() -> fx.Node:
        row = b.call(aten.select.int, b.fetch(parameter(), 4, 4), 0, draw(st.integers(0, 3)))
        return b.call(aten.mul.Tensor, value(), row)

    def both() -> fx.Node:
        return b.call(aten.addmm.default, b.fetch(parameter(), 4, 4), value(), value())

    def halves() -> fx.Node:
        split = b.call(aten.split.Tensor, value(), 2)
        parts = [b.call(operator.getitem, split, i) for i in range(2)]
        return b.call(aten.cat.default, parts[::-1])

    def norm() -> fx.Node:
        outputs = b.call(aten.native_layer_norm.default, value(), [4], None, None, 1e-5)
        normed = b.call(operator.getitem, outputs, 0)
        if draw(st.booleans()):
            rstd = b.call(operator.getitem, outputs, 2)
            normed = b.call(aten.mul.Tensor, normed, rstd)
        return normed

    makers = [
        mm,
        mm,
        scaled,
        both,
        halves,
        norm,
        lambda: b.call(aten.relu.default, value()),
        lambda: b.call(aten.add.Tensor, value(), value()),
        lambda: b.call(aten.permute.default, value(), [1, 0]),
        lambda: b.call(aten.slice.Tensor, value(), 0, 0, 4),
    ]
    for _ in range(draw(st.integers(1, 12))):
        values.append(makers[draw(pick) % len(makers)]())
        if draw(st.integers(0, 4)) == 0:
            b.reduce(value(), parameter())
    outputs = [values[-1]]
    for _ in range(draw(st.integers(0, 2))):
        outputs.append(value())
    if draw(st.integers(0, 5)) == 0:
        outputs.append(b.fetch(parameter(), 4, 4))
    chunk_of = {p: draw(st.integers(0, 2)) for p in range(PARAMETERS) if draw(st.integers(0, 5))}
    return Drawn(gm=b.output(*outputs), chunk_of=chunk_of)
