"""Sparse gradients: refused where a plan would move them, as in PyTorch where none does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from tests.training import assert_same, managed

IDS = torch.tensor([[1, 2, 3], [1, 5, 7]])


class Table(nn.Module):
    """A table with sparse gradients; ``tied`` reads it as a whole as well, before or after."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding, *, tied: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = kind(64, 16, sparse=True)
        self.layer = nn.Linear(16, 16)
        self.tied = tied

    def forward(self, ids: Tensor) -> Tensor:
        first = self.table.weight.square().sum() if self.tied == "before" else 0.0
        x = self.layer(self.table(ids))
        return x @ self.table.weight.T if self.tied == "after" else x + first


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(run: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    seen = []
    for _ in range(2):
        for _ in range(2):
            run(IDS).square().sum().backward()
            grad = model.table.weight.grad
            seen.append((str(grad.layout), grad.to_dense().clone()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("arena", [None, "5KiB"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_compiled(kind: type[nn.Module], arena: str | None, inner: str) -> None:
    run, model = managed(Table(kind), arena=arena, inner=inner)
    with pytest.raises(ValueError, match=r"'table\.weight'.*sparse=False") as caught:
        run(IDS)
    assert "layer.weight" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
    model.table.requires_grad_(False)
    run(IDS).sum().backward()
    model.table.requires_grad_(True)
    with pytest.raises(ValueError, match="sparse=False"):
        run(IDS), run(IDS)


@pytest.mark.parametrize("arena", [None, "5KiB"])
def test_compiled_without_gradients(arena: str | None) -> None:
    plain = Table()
    run, model = managed(Table(), arena=arena)
    with torch.no_grad():
        assert torch.equal(run(IDS), plain(IDS))
    model.table.requires_grad_(False)
    run(IDS).sum().backward()
    assert model.table.weight.grad is None and model.layer.weight.grad is not None


@pytest.mark.parametrize("arena", [None, "5KiB"])
@pytest.mark.parametrize("tied", ["", "before", "after"])
@pytest.mark.parametrize("disabled", [False, True], ids=["eager", "outside the graph"])
def test_on_demand(tied: str, arena: str | None, disabled: bool) -> None:
    plain = Table(tied=tied)
    expected = train(plain, plain, [sgd(plain.parameters())])
    if disabled:
        torch._dynamo.reset()
        run, model = managed(Table(tied=tied), arena=arena)
        model.table.forward = torch.compiler.disable(model.table.forward)
    else:
        run = model = pstar.manage(Table(tied=tied), device="cpu", arena_memory=arena)
    assert_same(train(run, model, [sgd(model.parameters())]), expected)
    assert_same(model.state_dict(), plain.state_dict())


def test_sparse_adam() -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam([model.table.weight]), sgd(model.layer.parameters())]

    plain = Table()
    expected = train(plain, plain, optimizers(plain))
    model = pstar.manage(Table(), device="cpu", arena_memory="5KiB")
    assert_same(train(model, model, optimizers(model)), expected)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", [sgd, pytest.param(None, id="chunked")])
def test_cast(make: Callable[[Any], torch.optim.Optimizer] | None) -> None:
    plain = Table()
    model = pstar.manage(
        copy.deepcopy(plain), device="cpu", arena_memory="5KiB", param_dtype=torch.bfloat16
    )
    optimizer = (
        pstar.ChunkedOptimizer(model, torch.optim.SGD, lr=0.1, fused=False)
        if make is None
        else make(model.parameters())
    )
    expected = train(plain, plain, [sgd(plain.parameters())])
    actual = train(model, model, [optimizer])
    for (layout, ours), (other, theirs) in zip(actual, expected, strict=True):
        assert layout == other == "torch.sparse_coo" and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.1)
