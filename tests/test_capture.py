"""Captured graphs: activation checkpointing never makes a parameter a saved activation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from passes.graph import META, memory_nodes
from pstar_compile import capture
from pstar_compile.managed import engine_of
from tests.training import Recorder, adamw, assert_trains_like_eager, managed, rows

LAYERS = 6


class Untransposed(nn.Module):
    """A weight that the forward reads as it is, and the backward transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


class Conv1D(nn.Module):
    """GPT-2's linear layer as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)).view(x.shape)


class Stack(nn.Module):
    """Layers, each call of which is checkpointed."""

    def __init__(self, make: Callable[[], nn.Module], reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class WithHead(Stack):
    """Each region reads a layer and a weight that all regions share."""

    def __init__(self, make: Callable[[], nn.Module], reentrant: bool) -> None:
        super().__init__(make, reentrant)
        self.head = nn.Parameter(torch.randn(32, 32) / 6)


class Method(WithHead):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(layer(x)) @ self.head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.step, layer, x, use_reentrant=self.reentrant)
        return x


class Closure(WithHead):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def step(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return torch.relu(layer(x)) @ self.head

            x = checkpoint(step, x, use_reentrant=self.reentrant)
        return x


class SharedBlock(Stack):
    """Each layer is called three times, each time in a region of its own, and once outside."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(3):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
            x = torch.tanh(layer(x))
        return x


def linear() -> nn.Module:
    return nn.Linear(32, 32)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "untransposed": lambda reentrant: Stack(Untransposed, reentrant),
    "conv1d": lambda reentrant: Stack(Conv1D, reentrant),
    "method": lambda reentrant: Method(linear, reentrant),
    "closure": lambda reentrant: Closure(linear, reentrant),
    "shared block": lambda reentrant: SharedBlock(mlp, reentrant),
    "shared untransposed": lambda reentrant: SharedBlock(Untransposed, reentrant),
}


def train(run: Any, model: nn.Module, recorder: Recorder) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    for step in range(3):
        x = rows(step).requires_grad_()
        output = run(x)
        output.square().mean().backward()
        recorder.keep(output, x.grad)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def fetches_of_backward(model: nn.Module) -> Counter[str]:
    """How often the captured backward fetches each parameter."""
    ((program,),) = (state.programs for state in engine_of(model).compiled.values())
    captured = program.outline.captured
    fetches = memory_nodes(captured.backward.graph, "fetch")
    return Counter(captured.parameters[n.meta[META].parameter].name for n in fetches)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_parameters_are_fetched_anew(name: str, reentrant: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name](reentrant)

    _, model = assert_trains_like_eager(build, train, arena="32KiB")
    assert fetches_of_backward(model) == Counter(n for n, _ in model.named_parameters())


def test_a_saved_parameter_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(node: fx.Node, graph_id: int) -> None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    monkeypatch.setattr(capture, "mark_recompute", save)
    compiled, _ = managed(Stack(Untransposed, False))
    with pytest.raises(Exception, match="internal error: the partitioner saves"):
        compiled(rows(0))
