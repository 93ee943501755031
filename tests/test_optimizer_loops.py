"""Loops that people write around an optimizer: each leaves what it leaves with the stock class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from tests.training import GPT, assert_at_rest, assert_same, copy_of, next_token_loss, tokens

Loop = Callable[[Any, nn.Module, Any], Any]
"""From what is called, the model and its optimizer to anything that is to be compared."""

PAGED = {"device_memory": "400KiB"}


def _both(
    loop: Loop,
    *,
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    params: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    update: str = "step",
    **settings: Any,
) -> None:
    """Run a loop with the stock class on the plain model, then chunk by chunk on a paged one."""
    left = []
    for managed in (False, True):
        torch._dynamo.reset()
        model = GPT(4)
        run: Any = model
        if managed:
            pstar.manage(model, device="cpu", **PAGED)
            options = {"inner": "eager", "chunk_bytes": "8KiB"}
            run = torch.compile(model, backend="patrickstar", options=options)
            optimizer: Any = pstar.ChunkedOptimizer(
                model,
                cls,
                params=params(model),
                update=update,  # type: ignore[arg-type]
                **settings,
            )
        else:
            fused = {"fused": True} if "fused" in cls.__init__.__annotations__ else {}
            optimizer = cls(params(model), **{**fused, **settings})
        log = loop(run, model, optimizer)
        values = {n: copy_of(p.detach()) for n, p in model.named_parameters()}
        left.append((log, values, copy_of(optimizer.state_dict())))
        if managed:
            assert_at_rest(model)
    assert_same(left[1], left[0])


def _step(run: Any, optimizer: Any, step: int, **zero: bool) -> Tensor:
    loss = next_token_loss(run, tokens(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(**zero)
    return loss.detach()


def _plain(count: int = 4) -> Loop:
    return lambda run, model, optimizer: [_step(run, optimizer, step) for step in range(count)]


def test_a_scaler_skips_the_step_whose_gradients_overflow() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        log = []
        for step in range(5):
            loss = next_token_loss(run, tokens(step))
            factor = float("inf") if step == 2 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            log.append((loss.detach(), scaler.get_scale()))
        scales = [scale for _, scale in log]
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        return log

    # The stock class unscales by itself when it is fused; the scaler then gives it the scale.
    _both(loop, fused=False)


def test_a_step_is_left_out_when_the_norm_is_not_finite() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log = []
        for step in range(5):
            loss = next_token_loss(run, tokens(step))
            (loss * (float("nan") if step == 2 else 1.0)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
            log.append((loss.detach(), norm))
        return log

    _both(loop)


def test_groups_are_added_as_layers_are_unfrozen() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log = [_step(run, optimizer, step) for step in range(2)]
        first = next(iter(model.parameters()))
        first.requires_grad_(True)
        optimizer.add_param_group({"params": [first], "lr": 3e-3, "weight_decay": 0.2})
        return log + [_step(run, optimizer, step) for step in range(2, 5)]

    def all_but_the_first(model: nn.Module) -> list[nn.Parameter]:
        first, *others = model.parameters()
        first.requires_grad_(False)
        return others

    _both(loop, params=all_but_the_first, lr=1e-2)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", ["OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers(name: str, update: str) -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        if name == "OneCycleLR":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
        else:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        log = []
        for step in range(6):
            loss = _step(run, optimizer, step % 2)
            scheduler.step(*([] if name == "OneCycleLR" else [1.0]))
            log.append((loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return log

    _both(loop, update=update, lr=1e-2)


class Lion(torch.optim.Optimizer):
    """A class that torch does not have: one moment, updates by sign."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.sub_((moment * group["beta"] + p.grad).sign(), alpha=group["lr"])
                moment.lerp_(p.grad, 1 - group["beta"])


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Lion, {"lr": 1e-3}),
        (torch.optim.Adafactor, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
        (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False, "fused": False}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": False}),
    ],
    ids=["third party", "adafactor", "maximize", "foreach", "tensor lr", "amsgrad"],
)
def test_other_classes_and_settings(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], update: str
) -> None:
    fused = {} if cls not in (torch.optim.AdamW, torch.optim.Adam) else {"fused": False}
    fused |= {"fused": None} if settings.get("foreach") else {}
    _both(_plain(), cls=cls, update=update, **{**fused, **settings})


@pytest.mark.parametrize("update", ["step", "backward"])
def test_muon_for_matrices(update: str) -> None:
    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2]

    _both(_plain(), cls=torch.optim.Muon, params=matrices, update=update, lr=1e-2)


def test_a_closure_computes_the_loss() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        def closure(step: int) -> Tensor:
            optimizer.zero_grad()
            loss = next_token_loss(run, tokens(step))
            loss.backward()
            return loss

        return [optimizer.step(lambda step=step: closure(step)).detach() for step in range(4)]

    _both(loop)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_evaluation_and_copies_between_steps(update: str) -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log: list[Any] = []
        for step in range(4):
            log.append(_step(run, optimizer, step))
            model.eval()
            with torch.no_grad():
                log.append(next_token_loss(run, tokens(step)))
            model.train()
            log.append(copy.deepcopy(model).state_dict())
            log.append(copy_of(optimizer.state_dict()))
        return log

    _both(loop, update=update, lr=1e-2)


def test_gradients_that_are_zeroed_in_place() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log = []
        for step in range(3):
            log.append(_step(run, optimizer, step, set_to_none=False))
            assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        return log

    _both(loop)


def test_gradients_that_are_never_zeroed() -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log = []
        for step in range(4):
            loss = next_token_loss(run, tokens(step))
            loss.backward()
            optimizer.step()
            log.append(loss.detach())
        return [*log, *(copy_of(p.grad) for p in model.parameters())]

    _both(loop)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_loop_goes_on_behind_an_error(update: str) -> None:
    def loop(run: Any, model: nn.Module, optimizer: Any) -> Any:
        log = [_step(run, optimizer, 0)]
        with pytest.raises(RuntimeError, match="a batch of nonsense"):
            loss = next_token_loss(run, tokens(1))
            raise RuntimeError(f"a batch of nonsense: {float(loss)}")
        return log + [_step(run, optimizer, step) for step in range(1, 4)]

    _both(loop, update=update, lr=1e-2)


def test_accumulation_is_refused_where_the_backward_updates() -> None:
    model = pstar.manage(GPT(2), device="cpu", **PAGED)
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    optimizer = pstar.ChunkedOptimizer(model, torch.optim.AdamW, lr=1e-2, update="backward")
    next_token_loss(run, tokens(0)).backward()
    with pytest.raises(RuntimeError, match=r"accumulating.*needs ChunkedOptimizer\(.*'step'\)"):
        next_token_loss(run, tokens(1)).backward()
    optimizer.step()
    _step(run, optimizer, 2)
