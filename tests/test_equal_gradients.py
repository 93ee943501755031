"""A parameter used several times, with the same gradient from each use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar


class Uses(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer, x)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer twice": lambda layer, x: layer(x) + layer(x),
    "bias again": lambda layer, x: layer(x) + layer.bias,
    "bias three times": lambda layer, x: layer(x) + layer.bias + layer.bias,
    "weight twice": lambda layer, x: x @ layer.weight.t() + x @ layer.weight.t(),
}


CASES: list[Any] = [(way, "eager") for way in WAYS]
CASES.append(pytest.param("layer twice", "inductor", marks=pytest.mark.inductor))


@pytest.mark.parametrize("arena", [None, 512])
@pytest.mark.parametrize(("way", "inner"), CASES)
def test_every_use_counts(way: str, arena: int | None, inner: str) -> None:
    plain = Uses(WAYS[way])
    model = pstar.manage(copy.deepcopy(plain), device="cpu", arena_memory=arena)
    compiled = torch.compile(model, backend="patrickstar", options={"inner": inner})
    x = torch.randn(4, 8)
    for run in (plain, compiled):
        run(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            # The uses' contributions may be added in another order.
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)
