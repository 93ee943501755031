"""What the package relies on in private torch APIs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pstar_compile.torch_compat import inductor_compile, kernels_together


@pytest.mark.inductor
def test_kernels_of_several_graphs_build_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[dict[str, Any]] = []
    wait = AsyncCompile.wait

    def counting(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waited.append(scope)
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", counting)
    compiled = []
    with kernels_together():
        for factor in (17, 19):
            graph = _graph(factor)
            values = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
            compiled.append(inductor_compile(graph, values)[0])
        assert not waited
    assert len(waited) == 2
    x = torch.arange(12.0)
    (first,), (second,) = (function([x]) for function in compiled)
    assert torch.equal(first, x * 17 + 1) and torch.equal(second, x * 19 + 1)


def _graph(factor: int) -> fx.GraphModule:
    def function(x: Tensor) -> list[Tensor]:
        return [x * factor + 1]

    with FakeTensorMode():
        example = torch.empty(12)
    return make_fx(function, tracing_mode="fake")(example)
