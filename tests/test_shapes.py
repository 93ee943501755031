"""Sizes that change, code that breaks into pieces, and paths that depend on the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pstar_compile as pstar
from pstar_compile.managed import engine_of
from tests.training import (
    GPT,
    MLP,
    Block,
    Recorder,
    adamw,
    assert_trains_like_eager,
    next_token_loss,
    rows,
    tokens,
)


@pytest.fixture(autouse=True)
def _count_from_zero() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield


def _compiles() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _variants(model: nn.Module) -> int:
    """All plans that the model's compiled graphs hold."""
    engine = engine_of(model)
    return sum(len(p._variants) for state in engine.compiled.values() for p in state.programs)


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_several_lengths(dynamic: bool | None) -> None:
    lengths = [6, 12, 9, 20, 7, 12, 30, 6]

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step, length in enumerate(lengths):
            loss = next_token_loss(run, tokens(step, length=length))
            loss.backward()
            recorder.keep(loss)
            if run is not model:
                plan, stats = pstar.last_plan(run), pstar.stats(model)
                assert (stats.h2d_bytes, stats.d2h_bytes) == (plan.h2d_bytes, plan.d2h_bytes)
                assert stats.on_demand_fetches == 0
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _, model = assert_trains_like_eager(lambda: GPT(2), loop, dynamic=dynamic)
    assert _compiles() == (1 if dynamic else 2)
    # A plan serves every size that needs no more room than it was made for.
    assert _variants(model) <= 4


def test_several_batch_sizes_and_lengths() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step, (batch, length) in enumerate([(2, 8), (3, 8), (3, 11), (5, 6), (2, 17)]):
            loss = next_token_loss(run, tokens(step, batch, length))
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    assert_trains_like_eager(lambda: GPT(2), loop)
    assert _compiles() <= 3


def test_a_ragged_last_batch() -> None:
    data = tokens(0, batch=10)
    chunks: list[set[Any]] = []

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for _ in range(2):
            for ids in data.split(4):
                loss = next_token_loss(run, ids)
                loss.backward()
                recorder.keep(loss)
                optimizer.step()
                optimizer.zero_grad()
                if run is not model:
                    chunks.append(set(engine_of(model).chunk_of.values()))
        return optimizer

    assert_trains_like_eager(lambda: GPT(2), loop)
    assert _compiles() == 2
    assert all(c == chunks[0] for c in chunks), "the second graph reuses the same chunks"


def test_two_forwards_of_different_sizes_then_their_backwards() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(4):
            losses = [next_token_loss(run, tokens(step, length=n)) for n in (6, 15)]
            for loss in losses if step % 2 else reversed(losses):
                loss.backward()
                recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    assert_trains_like_eager(lambda: GPT(2), loop)
    assert _compiles() <= 2


class _Bounded(MLP):
    def forward(self, x: Tensor, *, max_len: int) -> Tensor:
        return super().forward(x)[:, :max_len] / max_len


def test_an_integer_argument_that_changes_every_step() -> None:
    chunks: list[set[Any]] = []
    arenas: list[Any] = []

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(30):
            loss = run(rows(step), max_len=2 + step % 29).square().mean()
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
            if run is not model:
                chunks.append(set(engine_of(model).chunk_of.values()))
                arenas.append(engine_of(model).arena_generation)
        return optimizer

    _, model = assert_trains_like_eager(_Bounded, loop, arena="13KiB")
    assert _compiles() <= 3
    assert all(c == chunks[0] for c in chunks)
    assert arenas[2:] == [arenas[2]] * 28
    assert engine_of(model).pool.allocated_bytes <= 2 * sum(c.layout.nbytes for c in chunks[0])


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("inputs_need_grad", [False, True])
def test_twenty_equal_blocks_compiled_one_by_one(inputs_need_grad: bool) -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            x = rows(step, 12, 16).view(2, 6, 16).requires_grad_(inputs_need_grad)
            loss = run(x).square().mean()
            loss.backward()
            recorder.keep(loss, x.grad)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _, model = assert_trains_like_eager(
        _Deep, loop, arena="32KiB", pieces=lambda model: list(model.blocks)
    )
    # The first block's input needs no gradient, the others' do.
    assert _compiles() == (1 if inputs_need_grad else 2)
    engine = engine_of(model)
    assert set(engine.chunk_of) == set(engine.parameters), "each parameter in one chunk"
    plan, stats = pstar.last_plan(model), pstar.stats(model)
    assert len(plan.parts) == len(model.blocks) and "20 in this step" in str(plan)
    assert stats.h2d_bytes == plan.h2d_bytes > 0 and stats.d2h_bytes == plan.d2h_bytes > 0
    assert stats.on_demand_fetches == 0
    with pytest.raises(ValueError, match=r"20 graphs, .* see plan\.parts"):
        _ = plan.schedule


class _Broken(nn.Module):
    """A compiled piece, then eager code that reads a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l1 = nn.Linear(32, 32)
        self.w2 = nn.Parameter(torch.randn(32, 32) / 6)
        self.l3 = nn.Linear(32, 32)

    @torch.compiler.disable
    def helper(self, h: Tensor) -> Tensor:
        assert self.w2.shape == (32, 32)
        return F.linear(h, self.w2) + self.w2.mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.helper(torch.tanh(self.l1(x))))


class _Metric(nn.Module):
    """A break, then a metric without gradients in a piece that gets no backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l1, self.l2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.probe = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.l1(x))
        torch._dynamo.graph_break()
        metric = self.probe(h.detach()).mean()
        torch._dynamo.graph_break()
        return self.l2(h), metric


class _Experts(nn.Module):
    """Each token goes to the expert that its router likes best; which ones is up to the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (choice == i).nonzero().flatten()
            if chosen.numel() > 0:
                result = result.index_add(
                    0, chosen, torch.tanh(expert(x[chosen])) * weights[chosen, None]
                )
        return self.out(x + result)


def _train_and_evaluate(run: Any, model: nn.Module, recorder: Recorder) -> Any:
    optimizer = adamw(model)
    compiles = []
    for step in range(6):
        out = run(rows(step, batch=2))
        out, metric = out if isinstance(out, tuple) else (out, None)
        loss = out.square().mean()
        loss.backward()
        recorder.keep(loss, metric)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                recorder.keep(run(rows(100 + step, batch=2)))
        compiles.append(_compiles())
    assert isinstance(model, _Experts) or compiles[2:] == [compiles[2]] * 4
    return optimizer


def test_eager_code_behind_a_break_reads_a_parameter() -> None:
    compiled, model = assert_trains_like_eager(_Broken, _train_and_evaluate, arena="13KiB")
    compiled(rows(0)).sum().backward()
    # Once for the helper's forward, and at most once more for its backward.
    assert pstar.stats(model).on_demand_fetches in (1, 2)
    assert pstar.stats(model).fetches > 0


def test_a_detached_metric_behind_a_break() -> None:
    assert_trains_like_eager(_Metric, _train_and_evaluate, arena="13KiB")


def test_experts_chosen_by_the_data() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = _train_and_evaluate(run, model, recorder)
        ran = [
            tuple(grads[f"experts.{i}.weight"] is not None for i in range(4))
            for values, grads in recorder.log
            if len(values) == 2
        ]
        assert len(set(ran)) > 2, "which experts run depends on the batch"
        return optimizer

    assert_trains_like_eager(_Experts, loop, arena="13KiB")


class _SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(6):
            h = torch.tanh(self.again(h) + h)
            torch._dynamo.graph_break()
        return h


def test_one_layer_used_in_several_pieces() -> None:
    assert_trains_like_eager(_SharedBlock, _train_and_evaluate, arena="13KiB")
