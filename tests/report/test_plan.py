"""What users see of a plan."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import pstar_compile as pstar
from passes.plan import Kind
from pstar_compile.config import format_bytes


@pytest.fixture
def plan() -> pstar.Plan:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    pstar.manage(model, device="cpu", arena_memory="40KiB")
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    run(torch.ones(2, 64)).sum().backward()
    return pstar.last_plan(run)


def test_tables_hold_the_plans_figures(plan: pstar.Plan) -> None:
    text = str(plan)
    for nbytes in (plan.peak_device_bytes, plan.arena_bytes, plan.h2d_bytes, plan.d2h_bytes):
        assert format_bytes(nbytes) in text
    for chunk in plan.chunks:
        name = plan.step.parameters[chunk.content[0].parameter].name
        row = rf"^{chunk.index} +{format_bytes(chunk.nbytes)} +float32 +host +{name}"
        assert re.search(row, text, re.M)
    rows = [line for line in text.splitlines() if re.match(r"\d+ +(forward|backward)", line)]
    assert len(rows) == len(plan.moments)


def test_every_memory_node_is_annotated(
    plan: pstar.Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan.print_readable()
    assert capsys.readouterr().out.strip() == text.strip()
    assert plan.print_readable(print_output=False) and not capsys.readouterr().out
    lines = text.splitlines()
    for action in plan.schedule.actions:
        if action.kind is Kind.COMPUTE:
            continue
        (line,) = [x for x in lines if re.match(rf"    run\.{action.kind}\({action.index}[,)]", x)]
        size = format_bytes(plan.chunks[action.chunk].nbytes)
        assert f"chunk {action.chunk}, {size}, moment {action.moment}" in line
        if action.kind is Kind.FETCH:
            assert f"host -> device @{action.offset}, needed at moment" in line
        if action.kind is Kind.OFFLOAD:
            place = "" if action.offset is None else f"device @{action.offset} "
            assert f"gradient {place}-> host" in line
    assert sum("self.segment_" in line for line in lines) == len(plan.moments)
    assert "def forward(run, " in text and "def backward(run, " in text


def test_one_line(plan: pstar.Plan) -> None:
    assert re.fullmatch(r"<Plan: 4 chunks, \d+ moments, \d+ actions>", repr(plan))
