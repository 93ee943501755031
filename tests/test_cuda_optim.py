"""``ChunkedOptimizer`` on a real GPU: states on either side, limited or not, train alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Home
from pstar_compile.managed import engine_of
from tests.training import GPT, next_token_loss, tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _losses(update: str | None, **memory: Any) -> tuple[list[Tensor], nn.Module, Any]:
    """Losses of ten AdamW steps; ``update`` None: the stock class on a plain model."""
    torch._dynamo.reset()
    model: nn.Module = GPT(4)
    run: Any
    optimizer: torch.optim.Optimizer
    if update is None:
        run = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        pstar.manage(model, device="cuda", **memory)
        options = {"inner": "eager", "chunk_bytes": "8KiB"}
        run = torch.compile(model, backend="patrickstar", options=options)
        optimizer = pstar.ChunkedOptimizer(
            model,
            torch.optim.AdamW,
            lr=1e-3,
            update=update,  # type: ignore[arg-type]
        )
    losses = []
    for step in range(10):
        loss = next_token_loss(run, tokens(step).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses, model, run


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("memory", [{}, {"arena_memory": "64KiB"}])
def test_losses_follow_the_stock_class(update: str, memory: dict[str, Any]) -> None:
    expected, _, _ = _losses(None)
    actual, model, _ = _losses(update, **memory)
    # The fused kernels of the host and the GPU round differently, by units in the last place.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert engine_of(model).homes == {Home.HOST if memory else Home.DEVICE}


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_limited_host_gives_the_same_losses_bit_for_bit(update: str) -> None:
    memory = {"arena_memory": "64KiB", "param_dtype": torch.bfloat16}
    expected, _, run = _losses(update, **memory)
    free = pstar.last_plan(run)
    limit = free.peak_host_bytes - sum(chunk.nbytes for chunk in free.chunks) // 2
    actual, _, run = _losses(update, host_memory=limit, **memory)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    plan = pstar.last_plan(run)
    assert plan.peak_host_bytes <= limit
    assert any(chunk.masters for chunk in plan.chunks) or plan.schedule.gradient_slots
