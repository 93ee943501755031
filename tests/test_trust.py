"""``trust_version_counters`` under optimizers that do not move those counters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pstar_compile as pstar
from tests.training import GPT, next_token_loss, tokens


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_write_parameters(optimizer_class: Any, how: dict[str, bool]) -> None:
    plain = GPT(3)
    model = pstar.manage(copy.deepcopy(plain), device="cpu", arena_memory="64KiB")
    options = {"inner": "eager", "trust_version_counters": True}
    compiled = torch.compile(model, backend="patrickstar", options=options)
    for owner, run in ((plain, plain), (model, compiled)):
        optimizer = optimizer_class(owner.parameters(), lr=0.05, **how)
        for step in range(4):
            next_token_loss(run, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
