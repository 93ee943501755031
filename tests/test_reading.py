"""Ways to read a parameter inside a forward: each gets what the attribute gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pstar_compile as pstar
from tests.training import assert_same, managed


class Net(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.layer.weight
        self.unread = nn.Linear(8, 8)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "get_parameter": lambda m, x: F.linear(x, m.layer.get_parameter("weight")),
    "get_parameter below": lambda m, x: F.linear(x, m.get_parameter("layer.weight")),
    "get_submodule": lambda m, x: F.linear(x, m.get_submodule("layer").weight),
    "named_parameters": lambda m, x: F.linear(x, dict(m.named_parameters())["layer.weight"]),
    "named_parameters of all": lambda m, x: (
        x * sum(p.sum() for n, p in m.named_parameters("a", remove_duplicate=False) if "b" not in n)
    ),
    "not recursive": lambda m, x: m.layer(x) + len(list(m.parameters(recurse=False))),
    "parameters": lambda m, x: F.linear(x, *m.layer.parameters()),
    "dtype and device": lambda m, x: m.layer(
        x.to(next(m.parameters()).device, next(m.parameters()).dtype)
    ),
    "penalty": lambda m, x: m.layer(x) + sum(p.square().sum() for p in m.parameters()),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_inside_a_forward(way: str, compiled: bool, dtype: torch.dtype | None) -> None:
    plain = Net(WAYS[way]).to(dtype)
    run, model = managed(Net(WAYS[way]), arena="2KiB", param_dtype=dtype)
    call = run if compiled else model
    x = torch.randn(4, 8).to(dtype)
    for _ in range(2):
        assert_same(call(x), plain(x))
        for each in (call, plain):
            each(x).float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            # Uses may be summed in another order, and in the master's dtype.
            tolerance = 1e-5 if dtype is None else 3e-2
            torch.testing.assert_close(
                ours.grad, theirs.grad.float(), rtol=tolerance, atol=tolerance
            )


def test_outside_a_forward() -> None:
    plain = Net(WAYS["parameters"])
    model = pstar.manage(Net(WAYS["parameters"]), device="cpu")
    for settings in ({}, {"prefix": "a"}, {"recurse": False}, {"remove_duplicate": False}):
        names = [n for n, _ in plain.named_parameters(**settings)]
        assert [n for n, _ in model.named_parameters(**settings)] == names
    assert model.get_parameter("layer.weight") is model.layer.weight is model.tied.weight
    for name in ("layer.nothing", "nothing.weight", "layer.forward"):
        for module in (plain, model):
            with pytest.raises(AttributeError):
                module.get_parameter(name)


@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_gradient_hook(compiled: bool) -> None:
    run, model = managed(Net(WAYS["get_submodule"]), arena="1KiB")
    masters = list(model.parameters())
    seen: list[Any] = []
    model.layer.weight.register_post_accumulate_grad_hook(lambda _: seen.extend(model.parameters()))
    (run if compiled else model)(torch.ones(2, 8)).sum().backward()
    assert len(seen) == len(masters)
    assert all(a is b for a, b in zip(seen, masters, strict=True))
