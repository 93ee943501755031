"""Kinds of modules: each trains bit for bit as in eager mode, paged through a small arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

from tests.training import (
    Recorder,
    adamw,
    assert_at_rest,
    assert_same,
    assert_trains_like_eager,
    managed,
    record,
    rows,
)

STEPS = 3


def loop_over(inputs: Callable[[int], Any], *, evaluate: bool = False) -> Callable[..., Any]:
    """Train ``STEPS`` steps on ``inputs``; then, if asked, evaluate once."""

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        for step in range(STEPS):
            output = run(inputs(step))
            loss = output.square().mean()
            loss.backward()
            recorder.keep(loss, output)
            optimizer.step()
            optimizer.zero_grad()
        if evaluate:
            model.eval()
            with torch.no_grad():
                recorder.keep(run(inputs(STEPS)))
        return optimizer

    return loop


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder that gives the same weights each time."""

    def seeded_build() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return seeded_build


class Looped(nn.Module):
    """One layer, used several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.layer(x))
        return x


class SharedWeight(nn.Module):
    """One weight in all layers, and one bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


class TwoArguments(nn.Module):
    """The same tensor reaches a submodule through two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.mix = nn.Bilinear(32, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            torch._dynamo.graph_break()
            h = self.mix(h, h)
        return h


class LoRA(nn.Module):
    """Frozen linears, each with trainable low-rank factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(32, 32) for _ in range(8)).requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(4, 32) * 0.1 for _ in range(8))
        self.up = nn.ParameterDict({f"layer{i}": torch.randn(32, 4) * 0.1 for i in range(8)})

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.base):
            x = torch.tanh(layer(x) + x @ self.down[i].T @ self.up[f"layer{i}"].T)
        return x


class Odd(nn.Module):
    """A scalar, an empty parameter, a one-element one, and an int8 weight with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 32))
        self.log_scale = nn.Parameter(torch.zeros(1))
        codes = torch.randint(-5, 5, (32, 32), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.log_scale.exp()
        x = torch.cat([x, x[:0] + self.empty]) * self.scale
        return x @ (self.codes.to(x.dtype) * 0.1)


class Recurrent(nn.Module):
    """Two layers of an RNN kind."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(32, 32, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.view(2, 2, 32))[0]


class Attention(nn.Module):
    """torch's own multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 2, 32)
        return self.attention(x, x, x, need_weights=False)[0]


class Twice(torch.autograd.Function):
    """A custom function with state on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor


class Custom(nn.Module):
    """A custom autograd function between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Twice.apply(self.first(x)))


def _normed(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(make(nn.Linear(32, 32)), nn.Tanh(), make(nn.Linear(32, 32)))


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def _parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "looped": Looped,
    "shared weight": SharedWeight,
    "same tensor twice": TwoArguments,
    "lora": LoRA,
    "odd parameters": Odd,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "encoder layer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    ),
    "custom function": Custom,
    "weight norm": lambda: _normed(parametrizations.weight_norm),
    "old weight norm": lambda: _normed(weight_norm),
    "spectral norm": lambda: _normed(parametrizations.spectral_norm),
    "parametrized": _parametrized,
    "batch norm": lambda: nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 32)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)),
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 2),
        nn.Flatten(),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_eager(name: str) -> None:
    build = seeded(MODELS[name])
    # Less than parameters and gradients together, so that they are paged.
    resident = sum(p.nbytes * (1 + p.requires_grad) for p in build().parameters())
    # In evaluation torch runs other kernels for these where nothing is traced.
    evaluate = name not in ("lstm", "gru", "attention", "encoder layer")
    # Dynamo does not trace RNNs: they fetch on demand and have no plan.
    assert_trains_like_eager(
        build,
        loop_over(rows, evaluate=evaluate),
        arena=resident * 3 // 4,
        paged=name not in ("lstm", "gru"),
    )


def test_an_embedding_larger_than_the_chunk_size() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(192, 32)
            self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

        def forward(self, ids: Tensor) -> Tensor:
            return self.layers(self.table(ids))

    def ids(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, 192, (4, 3), generator=generator)

    assert_trains_like_eager(seeded(Model), loop_over(ids), arena="80KiB", chunk_bytes="8KiB")


def test_dropout_draws_the_same_numbers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        torch.manual_seed(7)
        return loop_over(rows)(run, model, recorder)

    assert_trains_like_eager(seeded(build), loop, arena="16KiB")


def test_outputs_in_a_dict_and_unbound_outputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.first(x)
            return {"parts": self.second(h).unbind(0), "nested": [{"h": h}]}

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> None:
        for step in range(STEPS):
            out = run(rows(step))
            total = out["nested"][0]["h"].sum()
            for part in out["parts"]:
                total = total + part.square().sum()
            total.backward()
            recorder.keep(total)
            model.zero_grad()

    assert_trains_like_eager(seeded(Model), loop, arena="16KiB")


def test_modes_toggled_on_the_compiled_object() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> None:
        run(rows(0)).sum().backward()
        run.eval()
        with torch.no_grad():
            recorder.keep(run.training, run(rows(1)))
            run.train()
            recorder.keep(run.training, run(rows(2)))

    assert_trains_like_eager(seeded(build), loop, arena="16KiB")


def test_a_weight_tied_after_the_first_step_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 32)
            self.head = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    run, model = managed(seeded(Model)(), arena="16KiB")
    ids = torch.arange(4)
    run(ids).sum().backward()
    model.head.weight = model.table.weight
    with pytest.raises(RuntimeError, match=r"'head\.weight' was replaced after"):
        run(ids)


def test_frozen_weights_keep_no_gradient_and_stay_as_they_are() -> None:
    run, model = managed(seeded(LoRA)(), arena="16KiB")
    before = [p.detach().clone() for p in model.base.parameters()]
    record(loop_over(rows), run, model)
    assert_same([p.detach() for p in model.base.parameters()], before)
    assert all(p.grad is None for p in model.base.parameters())
    run(rows(0)).square().sum().backward()
    adapters = [*model.down, *model.up.values()]
    assert len(adapters) == 16 and all(p.grad is not None for p in adapters)
    assert_at_rest(model)


def test_a_function_of_a_weight_that_leaves_the_graph() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.second(F.relu(self.first(x))), self.first.weight, self.first.weight.T

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> None:
        kept = []
        for step in range(STEPS):
            out, weight, transposed = run(rows(step))
            (out.sum() + transposed.square().sum()).backward()
            kept.append(weight)
            recorder.keep(out)
        recorder.keep(*kept)

    assert_trains_like_eager(seeded(Model), loop, arena="16KiB")
