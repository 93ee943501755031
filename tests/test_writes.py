"""A forward that writes to a parameter in place is refused, compiled and in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pstar_compile as pstar
from tests.training import adamw, assert_same, managed, rows


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(32, 32))


class Clamp(Weight):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.clamp_(-0.5, 0.5)
        return x @ self.w


class Late(Weight):
    """Writes to a view, behind the last read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w
        with torch.no_grad():
            self.w.T[0] = 1.0
        return y


class Data(Weight):
    def forward(self, x: Tensor) -> Tensor:
        self.w.data.mul_(0.5)
        return x @ self.w


class Out(Weight):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(self.w, 0.5, out=self.w)
        return x @ self.w


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Embedding(8, 32, max_norm=0.5).weight
        self.ids = torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.embedding(self.ids, self.w, max_norm=0.5)


class Checkpointed(nn.Module):
    """The write is in a region within a region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Clamp()

    def region(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, x, use_reentrant=False)


def refused(call: Callable[[], Any], name: str) -> None:
    """The error is a ValueError, perhaps wrapped by Dynamo, that names parameter and remedies."""
    with pytest.raises(Exception) as caught:
        call()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert type(error) is ValueError, repr(error)
    for part in (f"in place: {name!r}", "outside the forward", "optimizer.step()", "unmanage"):
        assert part in str(error), error


MODELS: dict[type[nn.Module], str] = {
    Clamp: "w",
    Late: "w",
    Data: "w",
    Out: "w",
    MaxNorm: "w",
    Checkpointed: "inner.w",
}


@pytest.mark.parametrize("arena", [None, "64KiB"])
@pytest.mark.parametrize("mode", ["train", "no_grad", "frozen"])
@pytest.mark.parametrize("kind", MODELS)
def test_compiled(kind: type[nn.Module], mode: str, arena: str | None) -> None:
    run, model = managed(kind().requires_grad_(mode != "frozen"), arena=arena)
    with torch.set_grad_enabled(mode != "no_grad"):
        refused(lambda: run(rows(0)), MODELS[kind])
    assert_same(model.state_dict(), kind().state_dict())


@pytest.mark.inductor
def test_compiled_by_inductor() -> None:
    run, _ = managed(Clamp(), inner="inductor")
    refused(lambda: run(rows(0)), "w")


# Through .data nothing counts the write, which eager mode therefore cannot see.
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference"])
@pytest.mark.parametrize("kind", [k for k in MODELS if k is not Data])
def test_eager_with_a_budget(kind: type[nn.Module], mode: str) -> None:
    model = pstar.manage(kind(), device="cpu", arena_memory="64KiB")
    with torch.set_grad_enabled(mode == "train"), torch.inference_mode(mode == "inference"):
        refused(lambda: model(rows(0)), MODELS[kind])
    assert_same(model.state_dict(), kind().state_dict())
    pstar.unmanage(model)
    model(rows(0))


def test_eager_when_the_written_copy_is_evicted() -> None:
    class Then(Clamp):
        def __init__(self) -> None:
            super().__init__()
            self.rest = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(super().forward(x))

    reached: list[Tensor] = []
    model = pstar.manage(Then(), device="cpu", arena_memory="5KiB")
    model.rest.register_forward_hook(lambda module, args, output: reached.append(output))
    refused(lambda: model(rows(0)), "w")
    assert not reached, "the write is noticed when its copy makes room"


def test_a_copy_written_outside_any_forward_is_noticed_by_the_next() -> None:
    class Leak(Weight):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.w, self.w

    model = pstar.manage(Leak(), device="cpu", arena_memory="64KiB")
    _, kept = model(rows(0))
    with torch.no_grad():
        kept.zero_()
    refused(lambda: model(rows(0)), "w")
    _, kept = model(rows(0))
    with torch.no_grad():
        kept.zero_()
    pstar.unmanage(model)


def test_an_error_of_the_forward_is_not_hidden_by_its_write() -> None:
    class Failing(Clamp):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("mine")

    model = pstar.manage(Failing(), device="cpu", arena_memory="64KiB")
    with pytest.raises(KeyError, match="mine"):
        model(rows(0))


@pytest.mark.parametrize("compiled", [False, True])
def test_writes_to_clones_and_outside_the_forward_are_fine(compiled: bool) -> None:
    class Clone(Weight):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.clone().mul_(2)

    def train(run: Any, model: nn.Module) -> None:
        optimizer = adamw(model)
        for step in range(3):
            run(rows(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.w.clamp_(-0.5, 0.5)

    plain = Clone()
    train(plain, plain)
    run, model = managed(Clone())
    train(run if compiled else model, model)
    assert_same(model.state_dict(), plain.state_dict())
