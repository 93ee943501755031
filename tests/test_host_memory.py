"""A limited host: masters fetched and cast on the device, gradients in turns, the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Home, PlanError
from pstar_compile.hardware import rates_of
from pstar_compile.managed import engine_of
from tests.training import GPT, assert_at_rest, assert_same, copy_of, next_token_loss, tokens


def _train(
    *, update: str = "step", batches: tuple[int, ...] = (2, 2, 2, 2), **memory: Any
) -> tuple[list[Tensor], nn.Module, Any]:
    torch._dynamo.reset()
    model = GPT(4)
    pstar.manage(model, device="cpu", param_dtype=torch.bfloat16, **memory)
    options = {"inner": "eager", "chunk_bytes": "8KiB"}
    run = torch.compile(model, backend="patrickstar", options=options)
    optimizer = pstar.ChunkedOptimizer(
        model,
        torch.optim.AdamW,
        lr=1e-2,
        update=update,  # type: ignore[arg-type]
    )
    losses = []
    for step, batch in enumerate(batches):
        loss = next_token_loss(run, tokens(step, batch=batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        stats, plan = pstar.stats(model), pstar.last_plan(run)
        assert (stats.h2d_bytes, stats.d2h_bytes) == (plan.h2d_bytes, plan.d2h_bytes)
    left = [*losses, *(copy_of(p.detach()) for p in model.parameters())]
    assert_at_rest(model)
    return left, model, run


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("device", [{"arena_memory": "64KiB"}, {"device_memory": "400KiB"}])
def test_a_limited_host_changes_nothing_but_the_traffic(
    update: str, device: dict[str, Any]
) -> None:
    expected, _, run = _train(update=update, **device)
    free = pstar.last_plan(run)
    assert all(not chunk.masters for chunk in free.chunks)
    copies = sum(c.nbytes for c in free.chunks if c.home is Home.HOST)
    limit = free.peak_host_bytes - copies // 2
    actual, _, run = _train(update=update, host_memory=limit, **device)
    assert_same(actual, expected)
    plan = pstar.last_plan(run)
    assert plan.peak_host_bytes <= limit
    assert plan.h2d_bytes > free.h2d_bytes or plan.schedule.gradient_slots is not None
    assert f"host {pstar.config.format_bytes(limit)}" in str(plan)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("device", [{"arena_memory": "64KiB"}, {"device_memory": "400KiB"}])
def test_where_the_host_casts_slowly_the_device_does_and_the_numbers_stay(
    update: str, device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, run = _train(update=update, **device)
    narrow = pstar.last_plan(run)
    assert not any(chunk.wide for chunk in narrow.chunks)
    slow = replace(rates_of(torch.device("cpu")), cast_host=1e5)
    monkeypatch.setattr("pstar_compile.backend.rates_of", lambda device: slow)
    actual, _, run = _train(update=update, **device)
    assert_same(actual, expected)
    wide = pstar.last_plan(run)
    at_home = [chunk for chunk in wide.chunks if chunk.home is Home.HOST]
    assert at_home and all(chunk.wide for chunk in at_home if chunk.requires_grad)
    assert wide.h2d_bytes > narrow.h2d_bytes and wide.d2h_bytes > narrow.d2h_bytes
    assert "host, masters and gradients" in str(wide)


def test_the_least_host_memory_holds_states_and_two_gradients() -> None:
    device = {"arena_memory": "64KiB"}
    expected, _, run = _train(update="backward", **device)
    chunks = pstar.last_plan(run).chunks
    least = sum(c.state_bytes for c in chunks) + 2 * max(c.nbytes for c in chunks)
    actual, model, run = _train(update="backward", host_memory=least, **device)
    assert_same(actual, expected)
    plan = pstar.last_plan(run)
    assert plan.schedule.gradient_slots == 2
    assert all(chunk.masters for chunk in plan.chunks)
    # No gradient ever had a buffer beside those of the plan.
    free = engine_of(model).pool._free
    assert {n: len(b) for n, b in free.items() if b} == {plan.step.gradient_slot_bytes: 2}
    with pytest.raises(PlanError, match=rf"host_memory, now {least - 1} bytes, to at least"):
        _train(update="backward", host_memory=least - 1, **device)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_with_a_larger_batch_more_states_move_in_and_copies_go(update: str) -> None:
    device = {"device_memory": "400KiB"}
    _, _, run = _train(batches=(2,), update=update, **device)
    small = pstar.last_plan(run)
    sizes = (2, 2, 6, 2, 6)
    expected, _, run = _train(batches=sizes, update=update, **device)
    large = pstar.last_plan(run)
    assert large.peak_host_bytes > small.peak_host_bytes
    limit = (small.peak_host_bytes + large.peak_host_bytes) // 2
    actual, _, run = _train(batches=sizes, update=update, host_memory=limit, **device)
    assert_same(actual, expected)
    assert any(chunk.masters for chunk in pstar.last_plan(run).chunks)


def test_a_parameter_given_another_storage_is_fetched_from_there() -> None:
    model = GPT(2)
    # Master, two moments and a gradient, which any optimizer may need, and compute copies of a few.
    least = 17 * sum(p.numel() for p in model.parameters())
    pstar.manage(
        model,
        device="cpu",
        arena_memory="64KiB",
        host_memory=least,
        param_dtype=torch.bfloat16,
    )
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    plain = GPT(2).to(torch.bfloat16)
    assert_same(run(tokens(0)), plain(tokens(0)))
    assert any(chunk.masters for chunk in pstar.last_plan(run).chunks)
    with torch.no_grad():
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mine.data = mine.detach() * 2
            other.mul_(2)
    assert_same(run(tokens(0)), plain(tokens(0)))
