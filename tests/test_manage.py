"""``manage`` and ``unmanage``: an ordinary module outside a forward, a paged one inside."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import pstar_compile as pstar
from pstar_compile.managed import engine_of
from tests.training import (
    GPT,
    MLP,
    Recorder,
    adamw,
    assert_same,
    assert_trains_like_eager,
    managed,
    next_token_loss,
    record,
    rows,
    steps,
    tokens,
)


def _managed(model: nn.Module, **settings: Any) -> nn.Module:
    return pstar.manage(model, device="cpu", **settings)


def test_outside_a_forward_it_is_the_module_it_was() -> None:
    plain = GPT()
    keys, names = list(plain.state_dict()), [n for n, _ in plain.named_parameters()]
    parameters = list(plain.parameters())
    text = repr(plain)
    model = _managed(plain, arena_memory="64KiB")
    assert model is plain and repr(model) == text
    assert isinstance(model.norm, nn.LayerNorm) and type(model.norm).__name__ == "LayerNorm"
    assert list(model.state_dict()) == keys and [n for n, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.tokens.weight
    assert model.norm.weight is parameters[names.index("norm.weight")]
    assert hasattr(model.norm, "bias") and not hasattr(model.norm, "nothing")
    assert float(model.norm.weight.mean()) == 1.0


def test_state_dicts_load_in_every_direction() -> None:
    compiled, model = managed(GPT(seed=1))
    record(steps(2), compiled, model)
    state = model.state_dict()
    plain = GPT(seed=2)
    plain.load_state_dict(state)
    assert_same(dict(plain.named_parameters()), dict(model.named_parameters()))
    _, other = managed(GPT(seed=3))
    other.load_state_dict(plain.state_dict())
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    prefixed = {k.removeprefix("_orig_mod."): v for k, v in compiled.state_dict().items()}
    assert_same(dict(prefixed), dict(state))


def test_new_values_reach_the_next_step() -> None:
    ids = tokens(0)
    compiled, model = managed(GPT(seed=1))
    with torch.no_grad():
        next_token_loss(compiled, ids)
        model.load_state_dict(GPT(seed=5).state_dict())
        loaded = next_token_loss(compiled, ids)
        model.norm.weight.data.mul_(2)
        doubled = next_token_loss(compiled, ids)
        plain = GPT(seed=5)
        assert torch.equal(loaded, next_token_loss(plain, ids))
        plain.norm.weight.data.mul_(2)
        assert torch.equal(doubled, next_token_loss(plain, ids))


def test_moves_and_conversions_after_manage(caplog: pytest.LogCaptureFixture) -> None:
    compiled, model = managed(MLP())
    record(lambda run, model, recorder: run(rows(0)).sum().backward(), compiled, model)
    places = [p.data_ptr() for p in model.parameters()]
    assert model.cpu() is model and model.to("cpu") is model
    with caplog.at_level(logging.WARNING):
        model.to("meta")
    assert "buffers of a managed model stay" in caplog.text
    assert model.calls.device.type == "cpu"
    assert [p.data_ptr() for p in model.parameters()] == places
    for convert in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(ValueError, match="convert the model before pstar_compile"):
            convert()
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_a_copy_is_managed_and_independent() -> None:
    compiled, model = managed(GPT(seed=1))
    record(steps(2), compiled, model)
    twin = copy.deepcopy(model)
    assert engine_of(twin) is not engine_of(model)
    assert twin.head.weight is twin.tokens.weight
    assert_same(dict(twin.named_parameters()), dict(model.named_parameters()))
    plain = copy.deepcopy(GPT(seed=9))
    plain.load_state_dict(model.state_dict())
    run = torch.compile(twin, backend="patrickstar", options={"inner": "eager"})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = record(steps(2, start=5), plain, plain)
    assert_same(record(steps(2, start=5), run, twin)["parameters"], expected["parameters"])
    assert_same(dict(model.named_parameters()), before)


def test_pickling_is_refused() -> None:
    model = _managed(MLP())
    with pytest.raises(TypeError, match=r"save model\.state_dict\(\) instead"):
        pickle.dumps(model)


def test_unmanage_gives_the_plain_module_back() -> None:
    plain = GPT()
    expected = record(steps(4), plain, plain)
    compiled, model = managed(GPT())
    optimizer = adamw(model)

    def some(run: Any, count: int, start: int) -> None:
        for step in range(start, start + count):
            next_token_loss(run, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    some(compiled, 2, 0)
    assert pstar.unmanage(compiled) is model
    assert type(model) is GPT and type(model.norm) is nn.LayerNorm
    assert not any(k.startswith("_pstar") for m in model.modules() for k in vars(m))
    some(model, 2, 2)
    assert_same({n: p.detach() for n, p in model.named_parameters()}, expected["parameters"])
    assert torch.equal(next_token_loss(compiled, tokens(0)), next_token_loss(model, tokens(0)))


def test_eager_mode_holds_its_budget() -> None:
    plain = GPT()
    expected = record(steps(3), plain, plain)
    model = _managed(GPT(), arena_memory="40KiB")
    on_demand = engine_of(model).on_demand
    peaks: list[int] = []
    fetch = on_demand.fetch

    def watched(parameter: Any) -> Tensor:
        result = fetch(parameter)
        peaks.append(on_demand.resident_bytes)
        return result

    on_demand.fetch = watched  # type: ignore[method-assign]
    assert_same(record(steps(3), model, model), expected)
    assert 0 < max(peaks) <= 40 * 1024
    assert pstar.stats(model).on_demand_fetches > 0


def test_a_weight_that_the_user_keeps_stays_valid() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                self.kept.append(layer.weight)
                x = layer(x)
            return x

    model = _managed(Keeping(), arena_memory="9KiB")
    model(rows(0))
    assert_same([k.detach() for k in model.kept], [x.weight.detach() for x in model.layers])


def test_module_compile_and_direct_calls() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> None:
        plain_call = getattr(run, "_orig_mod", run)
        for call in (run, plain_call, run):
            loss = next_token_loss(call, tokens(1))
            loss.backward()
            recorder.keep(loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()

    assert_trains_like_eager(GPT, loop)
    model = _managed(GPT(), arena_memory="64KiB")
    model.compile(backend="patrickstar", options={"inner": "eager"})
    next_token_loss(model, tokens(0)).backward()
    assert pstar.last_plan(model).h2d_bytes == pstar.stats(model).h2d_bytes > 0
    assert not any("_orig_mod" in k for k in model.state_dict())


def test_a_plain_model_compiles_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pstar_compile.backend._warned_unmanaged", False)
    plain, model = MLP(), MLP()
    with caplog.at_level(logging.WARNING, logger="pstar_compile"):
        for _ in range(2):
            torch._dynamo.reset()
            run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
            assert torch.equal(run(rows(0)), plain(rows(0)))
    assert [r.message.count("is not managed") for r in caplog.records] == [1]
    assert pstar.last_plan(run).moments


def test_a_deleted_model_is_freed_although_its_code_is_kept() -> None:
    compiled, model = managed(GPT())
    record(steps(2), compiled, model)
    engine = weakref.ref(engine_of(model))
    del compiled, model
    gc.collect()
    assert engine() is None


def test_nothing_grows_with_the_steps() -> None:
    compiled, model = managed(MLP(layers=3), arena="9KiB")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(count: int) -> int:
        for step in range(count):
            compiled(rows(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, Tensor))

    settled = train(20)
    allocated = engine_of(model).pool.allocated_bytes
    assert train(300) == settled
    assert engine_of(model).pool.allocated_bytes == allocated


def _train_in_a_process(rank: int) -> None:
    compiled, model = managed(MLP(), arena="16KiB")
    compiled(rows(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_process_that_trained_exits() -> None:
    context = mp.spawn(_train_in_a_process, nprocs=1, join=False)
    assert context.join(timeout=90)
