"""Steps whose activations are too many are compiled again with more recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.recompute import lower

INPUT = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(32, 128, bias=False)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 32, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.nn.functional.gelu(self.up(x)))
        return x + self.down(self.norm(y))


def _train(
    device_memory: int | None, *, inner: str = "eager", dropout: float = 0.0, dynamic: bool = False
) -> tuple[list[float], list[Tensor], pstar.Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(dropout=dropout) for _ in range(6)])
    pstar.manage(model, device="cpu", device_memory=device_memory)
    options = {"inner": inner}
    run = torch.compile(model, backend="patrickstar", options=options, dynamic=dynamic)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = run(INPUT).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in model.parameters()], pstar.last_plan(run)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_that_saves_too_much_recomputes_until_it_fits(dropout: float, dynamic: bool) -> None:
    losses, gradients, plan = _train(None, dropout=dropout, dynamic=dynamic)
    assert not plan.step.notes
    fractions = []
    for percent in (80, 60):
        budget = plan.peak_device_bytes * percent // 100
        tight = _train(budget, dropout=dropout, dynamic=dynamic)
        assert tight[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(tight[1], gradients, strict=True))
        assert tight[2].peak_device_bytes <= budget
        (note,) = tight[2].step.notes
        assert note in str(tight[2])
        fractions.append(float(note.split(" to ")[1].split(",")[0]))
    assert 1 > fractions[0] > fractions[1] > 0


def test_a_step_that_fits_saves_what_it_saves_by_default() -> None:
    plan = _train(None)[2]
    assert not _train(plan.peak_device_bytes)[2].step.notes


@pytest.mark.inductor
def test_compiled_code_decides_whether_the_step_fits() -> None:
    losses, _, plan = _train(None, inner="inductor")
    tight = _train(plan.peak_device_bytes * 7 // 10, inner="inductor")
    assert tight[2].step.notes
    assert tight[0] == pytest.approx(losses, rel=1e-5)


def test_what_recomputation_cannot_help_is_refused_with_the_figures() -> None:
    with pytest.raises(pstar.PlanError, match="raise device_memory to at least"):
        _train(1 << 20)


def test_an_arena_that_is_too_small_is_not_blamed_on_activations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = pstar.manage(Block(), device="cpu", device_memory="64MiB", arena_memory=1024)
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    with caplog.at_level("INFO", logger="pstar_compile"), pytest.raises(pstar.PlanError):
        run(INPUT)
    assert "compiling again" not in caplog.text


@pytest.mark.parametrize(
    ("missing", "expected"), [(1, 0.8), (20, 0.8), (21, 0.6), (55, 0.2), (100, 0.1)]
)
def test_the_first_fraction_that_saves_enough_is_taken(missing: int, expected: float) -> None:
    peaks = {1.0: 100, 0.8: 80, 0.6: 70, 0.4: 70, 0.2: 45, 0.1: 40, 0.05: 60}
    assert lower(1.0, missing, peaks.__getitem__, present_peak=100) == expected


def test_no_fraction_is_taken_if_none_saves_anything() -> None:
    assert lower(1.0, 1, lambda fraction: 100, present_peak=100) is None
    assert lower(0.05, 1, lambda fraction: 0, present_peak=100) is None
