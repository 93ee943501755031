"""Activation checkpointing of a managed model that is not compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pstar_compile as pstar


class Net(nn.Module):
    """Checkpoints a part of its forward that reads a parameter of its own and calls a module."""

    def __init__(self, way: str, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.way = way
        self.use_reentrant = use_reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        parts: dict[str, Callable[[Tensor], Any]] = {
            "method": self.part,
            "closure": lambda x: torch.relu(self.layer(x)) @ self.weight,
            "module": self.layer,
        }
        y: Tensor = checkpoint(parts[self.way], x, use_reentrant=self.use_reentrant)
        return y + self.layer(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", ["method", "closure", "module"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_checkpointed_part_of_a_forward(
    way: str, use_reentrant: bool, dtype: torch.dtype | None
) -> None:
    plain = Net(way, use_reentrant=use_reentrant)
    model = pstar.manage(
        copy.deepcopy(plain), device="cpu", arena_memory=8 * 8 * 4, param_dtype=dtype
    )
    plain = plain if dtype is None else plain.to(dtype)
    x = torch.randn(2, 8, dtype=dtype)
    for each in (plain, model):
        each(x.clone().requires_grad_()).float().square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if dtype is None:
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        elif ours.grad is not None:
            # Masters accumulate in fp32, plain bf16 parameters in bf16.
            torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=2e-2, atol=2e-2)


def test_a_repeated_part_is_no_new_step() -> None:
    model = pstar.manage(Net("method", use_reentrant=False), device="cpu", arena_memory=8 * 8 * 4)
    x = torch.randn(2, 8)
    loss = model(x).square().mean()
    forward = pstar.stats(model).h2d_bytes
    loss.backward()
    assert pstar.stats(model).h2d_bytes > forward > 0
