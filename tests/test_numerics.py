"""Training through a paged plan is training: bit for bit, with the traffic that the plan says."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Direction, Home, Kind
from pstar_compile.managed import engine_of
from tests.training import (
    GPT,
    MLP,
    Recorder,
    adamw,
    assert_at_rest,
    assert_same,
    assert_trains_like_eager,
    blocks_of,
    copy_of,
    gradients,
    managed,
    next_token_loss,
    record,
    rows,
    state_of,
    steps,
    tokens,
)


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_twenty_steps_equal_eager(prefetch: int | None) -> None:
    assert_trains_like_eager(GPT, steps(20), prefetch=prefetch)


@pytest.mark.parametrize("arena", ["36KiB", "50KiB", "150KiB"])
def test_any_arena_equals_eager(arena: str) -> None:
    compiled, _ = assert_trains_like_eager(GPT, steps(3), arena=arena)
    assert pstar.last_plan(compiled).arena_bytes <= int(arena.removesuffix("KiB")) * 1024


@pytest.mark.parametrize("chunk_bytes", ["1KiB", "8KiB", "20KiB"])
def test_any_chunk_size_equals_eager(chunk_bytes: str) -> None:
    assert_trains_like_eager(GPT, steps(3), chunk_bytes=chunk_bytes)


def test_a_model_that_fits_equals_eager() -> None:
    compiled, model = assert_trains_like_eager(GPT, steps(3), arena=None, paged=False)
    assert engine_of(model).homes == {Home.DEVICE}
    assert pstar.last_plan(compiled).h2d_bytes == 0


def test_an_unmanaged_model_equals_eager() -> None:
    plain, other = GPT(2), GPT(2)
    compiled = torch.compile(other, backend="patrickstar", options={"inner": "eager"})
    assert_same(record(steps(3), compiled, other), record(steps(3), plain, plain))


def _checkpointed() -> GPT:
    return GPT(checkpointed=True)


def test_checkpointed_blocks_in_the_compiled_model() -> None:
    # Room for a block, the gradient of its largest chunk and one chunk ahead.
    compiled, _ = assert_trains_like_eager(_checkpointed, steps(4), arena="100KiB")
    plan = pstar.last_plan(compiled)
    backward = {m.index for m in plan.moments if m.direction is Direction.BACKWARD}
    fetched: Counter[int | None] = Counter()
    for action in plan.schedule.actions:
        if action.kind is Kind.FETCH:
            fetched[action.chunk] += 1
        elif action.kind is Kind.RELEASE and action.moment not in backward:
            # What is resident at the turn counts as fetched for the backward.
            fetched[action.chunk] = 0
    names = [p.name for p in plan.step.parameters]
    of_blocks = [
        c.index
        for c in plan.chunks
        if any(names[slot.parameter].startswith("blocks.") for slot in c.content)
    ]
    # A block's recomputed forward and its backward share one fetch of each of its chunks.
    assert {fetched[chunk] for chunk in of_blocks} == {1}
    twice = [c for c in of_blocks if sum(c in plan.moments[m].needs for m in backward) > 1]
    assert len(twice) > 4, "chunks that both the recomputed forward and the backward read"


def test_compiled_blocks_in_an_eager_checkpoint() -> None:
    assert_trains_like_eager(_checkpointed, steps(4), pieces=blocks_of)


def _autocast_loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
    optimizer = adamw(model)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(run, tokens(step))
        loss.backward()
        recorder.keep(loss)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("pieces", [None, blocks_of])
@pytest.mark.parametrize("build", [GPT, _checkpointed])
def test_autocast(build: Any, pieces: Any) -> None:
    assert_trains_like_eager(build, _autocast_loop, pieces=pieces)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_parameter_is_saved_for_the_backward(autocast: bool, checkpointed: bool) -> None:
    compiled, model = managed(GPT(checkpointed=checkpointed))
    # No two parameters alike, and none alike any activation.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for step in range(2):
        saved.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            out = compiled(tokens(step)[:, :-1])
        assert sum(t.numel() > 1 for t in saved) > 4
        engine = engine_of(model)
        assert engine.arena is not None
        forbidden = {engine.arena.untyped_storage().data_ptr()}
        forbidden |= {p.untyped_storage().data_ptr() for p in model.parameters()}
        for tensor in saved:
            assert tensor.untyped_storage().data_ptr() not in forbidden
            for name, parameter in model.named_parameters():
                if tensor.is_floating_point() and tensor.numel() == parameter.numel():
                    values = parameter.detach().to(tensor.dtype).flatten().sort().values
                    assert not torch.equal(tensor.flatten().sort().values, values), name
        out.float().sum().backward()


@pytest.mark.inductor
def test_inductor_within_tolerance() -> None:
    """Inductor fuses and reorders sums; single precision leaves some 1e-6 of that in each step."""
    plain, model = GPT(1), GPT(1)
    expected = record(steps(5, make_optimizer=_sgd), plain, plain)
    compiled, _ = managed(model, inner="inductor", arena="36KiB")
    actual = record(steps(5, make_optimizer=_sgd), compiled, model)
    torch.testing.assert_close(actual["log"], expected["log"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual["parameters"], expected["parameters"], rtol=1e-4, atol=1e-6)
    assert engine_of(model).homes == {Home.HOST}
    assert_at_rest(model)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_bfloat16_compute_copies_of_fp32_masters() -> None:
    masters = GPT()
    copies = copy.deepcopy(masters).bfloat16()
    compiled, model = managed(GPT(), arena="32KiB", param_dtype=torch.bfloat16)
    reference, optimizer = adamw(masters), adamw(model)
    for step in range(4):
        with torch.no_grad():
            for ours, low in zip(masters.parameters(), copies.parameters(), strict=True):
                low.copy_(ours)
        expected = next_token_loss(copies, tokens(step))
        expected.backward()
        for ours, low in zip(masters.parameters(), copies.parameters(), strict=True):
            assert low.grad is not None
            ours.grad = low.grad.float()
        loss = next_token_loss(compiled, tokens(step))
        loss.backward()
        assert_same(loss, expected)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert_same(gradients(model), gradients(masters))
        reference.step()
        optimizer.step()
        masters.zero_grad()
        copies.zero_grad()
        optimizer.zero_grad()
    assert_same(state_of(model), state_of(masters))
    assert engine_of(model).homes == {Home.HOST}


class _Mixed(nn.Module):
    """Linear layers of one dtype with norms, or a head, of another."""

    def __init__(self, body: torch.dtype, norms: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=body) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(32, dtype=norms) for _ in range(4))
        self.head = nn.Linear(32, 8, dtype=head)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x.to(norm.weight.dtype)).to(layer.weight.dtype)
            x = x + torch.tanh(layer(x))
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float64),
    ],
    ids=["fp32 norms", "fp64 head"],
)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(5):
            loss = run(rows(step)).square().mean()
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _, model = assert_trains_like_eager(lambda: _Mixed(*dtypes), loop, arena="10KiB")
    for parameter, dtype in ((model.layers[0].weight, 0), (model.norms[0].weight, 1)):
        assert parameter.dtype is dtypes[dtype]
    assert model.head.weight.dtype is dtypes[2]


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.spectrum = nn.Parameter(torch.randn(4, 17, dtype=torch.complex64))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.spectrum)
        return self.last(x)


def test_a_complex_parameter() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            loss = run(rows(step)).square().mean()
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    assert_trains_like_eager(_Complex, loop, arena="8KiB")


@pytest.mark.parametrize("arena", ["36KiB", "64KiB"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_the_plan_is_the_truth(arena: str, param_dtype: torch.dtype | None) -> None:
    compiled, model = managed(GPT(), arena=arena, param_dtype=param_dtype)
    optimizer = adamw(model)
    for step in range(5):
        next_token_loss(compiled, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plan, stats = pstar.last_plan(compiled), pstar.stats(model)
        assert stats.h2d_bytes == plan.h2d_bytes > 0
        assert stats.d2h_bytes == plan.d2h_bytes > 0
        assert stats.arena_peak_bytes == plan.arena_bytes
        assert stats.fetches == sum(a.kind is Kind.FETCH for a in plan.schedule.actions)
        assert stats.on_demand_fetches == stats.on_demand_bytes == stats.carried_bytes == 0
        # Every gradient is copied once, with its chunk or from where it was computed.
        left = [a for a in plan.schedule.actions if a.kind is Kind.OFFLOAD]
        assert {a.chunk for a in left} == {c.index for c in plan.chunks if c.requires_grad}
        for action in left:
            chunk = plan.chunks[action.chunk]
            content = sum(slot.nbytes for slot in chunk.content)
            assert action.nbytes == (content if action.offset is None else chunk.nbytes)


def test_inference_traffic_is_the_plans() -> None:
    compiled, model = managed(GPT())
    for _ in range(3):
        with torch.no_grad():
            compiled(tokens(0)[:, :-1])
        plan, stats = pstar.last_plan(compiled), pstar.stats(model)
        # Each chunk once, and that of the tied weight for the embedding and for the head.
        (tied,) = (c for c in plan.chunks if c.nbytes == model.head.weight.nbytes)
        assert stats.h2d_bytes == plan.h2d_bytes == sum(c.nbytes for c in plan.chunks) + tied.nbytes
        assert stats.d2h_bytes == plan.d2h_bytes == 0
        assert stats.arena_peak_bytes == plan.arena_bytes
    assert_at_rest(model)


def test_chunks_are_carried_only_over_unchanged_steps() -> None:
    compiled, model = managed(GPT(), arena="150KiB", trust_version_counters=True)
    optimizer = adamw(model)
    plain = GPT()
    reference = adamw(plain)
    carried = []
    for step in range(6):
        loss = next_token_loss(compiled, tokens(step))
        loss.backward()
        expected = next_token_loss(plain, tokens(step))
        expected.backward()
        assert_same(loss, expected)
        plan, stats = pstar.last_plan(compiled), pstar.stats(model)
        assert stats.h2d_bytes + stats.carried_bytes == plan.h2d_bytes
        assert plan.carried_bytes > 0
        carried.append(stats.carried_bytes)
        if step in (2, 3):
            optimizer.step()
            reference.step()
    assert carried == [0, plan.carried_bytes, plan.carried_bytes, 0, 0, plan.carried_bytes]
    assert_same(state_of(model), state_of(plain))


def test_without_trust_nothing_is_carried() -> None:
    compiled, model = managed(GPT(), arena="150KiB")
    for step in range(3):
        next_token_loss(compiled, tokens(step)).backward()
        assert pstar.stats(model).carried_bytes == 0
        # Version counters do not see this.
        model.head.weight.data.view(-1)[:8] = 0.5
        assert_same(copy_of(_logits(compiled)), copy_of(_logits(_plain_copy(model))))


def _logits(run: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = run(tokens(0)[:, :-1])
    return out


def _plain_copy(model: nn.Module) -> GPT:
    plain = GPT()
    plain.load_state_dict(model.state_dict())
    return plain


def test_buffers_follow_the_forwards() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            loss = run(rows(step)).square().mean()
            loss.backward()
            recorder.keep(loss, dict(model.named_buffers()))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _, model = assert_trains_like_eager(MLP, loop, arena="13KiB")
    assert model.calls.item() == 3
