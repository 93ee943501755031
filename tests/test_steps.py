"""What a step was: ``stats`` and ``last_plan`` agree on it, whatever its graphs are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pstar_compile as pstar
from tests.training import rows

BLOCKS = 4
ARENA = "24KiB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks and a head; ``reentrant`` says how the blocks are checkpointed, None: they are not."""

    def __init__(self, reentrant: bool | None, *, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Block()] * BLOCKS if shared else [Block() for _ in range(4)])
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def one_by_one(model: Net, **options: Any) -> Net:
    """Manage a model and compile its blocks and its head, each on its own."""
    pstar.manage(model, device="cpu", arena_memory=ARENA)
    for module in (*dict.fromkeys(model.blocks), model.head):
        module.compile(backend="patrickstar", options={"inner": "eager", **options})
    return model


def train(run: Callable[[Tensor], Tensor], step: int) -> None:
    x = rows(step).requires_grad_()
    run(x).square().mean().backward()


def check(model: nn.Module, *, graphs: int) -> pstar.Plan:
    """What the counters saw is what the plans of the step say."""
    plan, stats = pstar.last_plan(model), pstar.stats(model)
    assert len(plan.parts) == graphs
    assert plan.d2h_bytes == stats.d2h_bytes
    assert plan.h2d_bytes == stats.h2d_bytes - stats.on_demand_bytes + stats.carried_bytes
    return plan


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_blocks_compiled_one_by_one(reentrant: bool | None, shared: bool, trust: bool) -> None:
    plain = Net(reentrant, shared=shared)
    model = one_by_one(copy.deepcopy(plain), trust_version_counters=trust)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            train(each, step)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        graphs = BLOCKS + 1 if reentrant is None else 2 * BLOCKS + 1
        plan = check(model, graphs=graphs)
        assert pstar.stats(model).d2h_bytes > 0
        assert str(plan) and plan.print_readable(print_output=False)
    with torch.no_grad():
        model(rows(0))
        assert check(model, graphs=BLOCKS + 1).d2h_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_called_by_a_function(reentrant: bool) -> None:
    """No forward of a managed module is around the blocks'."""
    model = one_by_one(Net(reentrant))

    def run(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    for step in range(3):
        train(run, step)
        check(model, graphs=2 * BLOCKS)


def test_a_graph_whose_result_the_loss_does_not_need() -> None:
    model = one_by_one(Net(None))
    for step in range(2):
        x = rows(step).requires_grad_()
        model.head(model.blocks[0](x)), model.blocks[1](x).sum().backward()
        plan = check(model, graphs=3)
    block, head, other = plan.parts
    assert [str(m.direction) for m in head.moments] == ["forward"]
    assert block.d2h_bytes == head.d2h_bytes == 0 < other.d2h_bytes
    assert "backward" not in head.print_readable(print_output=False)
    assert 0 < block.step_seconds < other.step_seconds
    assert block.h2d_bytes < other.h2d_bytes
