"""From contributions to ``p.grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from pstar_compile.managed import engine_of


class Noisy(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("broken backward")


def _model(**settings: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return pstar.manage(model, device="cpu", arena_memory=512, **settings)


def test_a_failed_backward_leaves_nothing() -> None:
    model = _model()
    x = torch.ones(2, 8)
    h = Noisy.apply(model[0](x))
    with pytest.raises(RuntimeError, match="broken backward"):
        model[1](h).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    assert not engine_of(model).gradients._pending


def test_a_gradient_has_its_masters_dtype() -> None:
    model = _model(param_dtype=torch.bfloat16)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_gradient_is_added_in_place_to_what_is_there() -> None:
    model = _model()
    x = torch.ones(2, 8)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    once = [g.clone() for g in grads]
    model(x).sum().backward()
    for parameter, grad, first in zip(model.parameters(), grads, once, strict=True):
        assert parameter.grad is grad and torch.equal(grad, first + first)


def test_a_gradient_shares_no_memory_with_the_users_tensors() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 8))
            self.other = nn.Parameter(torch.zeros(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias + self.other

    for arena in (None, 80):
        model = pstar.manage(Add(), device="cpu", arena_memory=arena)
        run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
        out_grad = torch.ones(2, 8)
        run(torch.ones(2, 8)).backward(out_grad)
        model.bias.grad.zero_()
        assert float(out_grad.sum()) == float(model.other.grad.sum()) == 16.0
        torch._dynamo.reset()
