"""What PyTorch does not compile runs by fetching on demand, says so, and spares other models."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from pstar_compile.managed import engine_of
from tests.training import managed

ARENA = "2KiB"


class Around(nn.Module):
    """A recurrent layer between others."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.inner = kind(8, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(self.before(x))
        return self.after(out if isinstance(out, Tensor) else out[0])


def train(run: nn.Module) -> None:
    for _ in range(2):
        out = run(torch.ones(3, 2, 8))
        (out if isinstance(out, Tensor) else out[0]).sum().backward()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_model_runs_without_a_plan(kind: type[nn.Module]) -> None:
    run, model = managed(kind(8, 8), arena=ARENA)
    train(run)
    assert pstar.stats(model).on_demand_fetches > 0
    with pytest.raises(
        ValueError, match=r"ran without a plan.*fetched on demand.*RNN.*graph_breaks"
    ):
        pstar.last_plan(run)


def test_an_uncompiled_model_is_told_to_compile() -> None:
    model = pstar.manage(nn.Linear(8, 8), device="cpu", arena_memory=ARENA)
    train(model)
    with pytest.raises(ValueError, match=r"without a plan.*torch\.compile\(model, backend="):
        pstar.last_plan(model)


def test_what_is_around_a_recurrent_layer_is_compiled() -> None:
    run, _ = managed(Around(nn.LSTM), arena=ARENA)
    train(run)
    plan = pstar.last_plan(run)
    names = [p.name for part in plan.parts for p in part.step.parameters]
    assert sorted(names) == ["after.bias", "after.weight", "before.bias", "before.weight"]


def test_models_after_one_that_is_not_compiled() -> None:
    train(managed(nn.Sequential(Around(nn.LSTM)), arena=ARENA)[0])
    for other in (nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8), Around(nn.Linear)):
        run, model = managed(other, arena=ARENA)
        train(run)
        assert pstar.stats(model).on_demand_fetches == 0 and pstar.last_plan(run).chunks


def test_models_do_not_use_up_the_limit_of_recompiles() -> None:
    engines = []
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        run, model = managed(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), arena=ARENA)
        train(run)
        assert pstar.stats(model).on_demand_fetches == 0 and pstar.last_plan(run).chunks
        engines.append(weakref.ref(engine_of(model)))
    del run, model
    gc.collect()
    assert not any(engine() for engine in engines)
