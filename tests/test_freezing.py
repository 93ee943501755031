"""``requires_grad`` changes after the chunks were made: they stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar

STEPS = 6


class Block(nn.Module):
    """Several parameters, which share a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def _part_of_a_chunk(model: nn.Sequential, step: int) -> None:
    model[1].up.bias.requires_grad_(step < 2)


def _a_whole_block(model: nn.Sequential, step: int) -> None:
    model[0].requires_grad_(step < 2)


def _gradual_unfreezing(model: nn.Sequential, step: int) -> None:
    for i, block in enumerate(model):
        block.requires_grad_(i >= len(model) - 1 - step)


def _halves_in_turn(model: nn.Sequential, step: int) -> None:
    for i, block in enumerate(model):
        block.requires_grad_((i < 2) == (step % 2 == 0))


@pytest.mark.parametrize("arena", [None, 8 * 1024], ids=["fits", "paged"])
@pytest.mark.parametrize(
    "change", [_part_of_a_chunk, _a_whole_block, _gradual_unfreezing, _halves_in_turn]
)
def test_freezing_between_steps(
    change: Callable[[nn.Sequential, int], None], arena: int | None
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(4)))
    model = pstar.manage(copy.deepcopy(plain), device="cpu", arena_memory=arena)
    options = {"inner": "eager"}
    for each in (plain, torch.compile(model, backend="patrickstar", options=options)):
        owner = plain if each is plain else model
        losses = []
        for step in range(STEPS):
            change(owner, step)
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
            loss = each(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                for parameter in owner.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            kept = [p.grad for p in owner.parameters()]
            owner.zero_grad()
        if each is plain:
            expected, grads = losses, kept
    assert all(map(torch.equal, losses, expected))
    for parameter, ours, theirs in zip(model.parameters(), kept, grads, strict=True):
        assert (ours is None) == (not parameter.requires_grad) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_between_manage_and_the_first_call() -> None:
    """Only what is trained must fit: here not even one layer's weight and gradient together do."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
    model = pstar.manage(copy.deepcopy(plain), device="cpu", device_memory=28 * 1024)
    compiled = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    x = torch.randn(4, 64)
    for each, owner in ((plain, plain), (compiled, model)):
        owner[0].requires_grad_(False)
        for _ in range(2):
            each(x).sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)
    pstar.last_plan(compiled)
    model[0].requires_grad_(True)
    compiled(x)
    with pytest.raises(ValueError, match="does not fit"):
        compiled(x)
