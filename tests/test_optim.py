"""ChunkedOptimizer: the stock class's numbers, wherever states live and whenever they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Home
from pstar_compile.managed import engine_of
from pstar_compile.runtime import shares
from tests.training import GPT, assert_at_rest, assert_same, copy_of, next_token_loss, tokens

Make = Callable[[nn.Module], torch.optim.Optimizer]

BUDGETS: dict[str, dict[str, Any]] = {
    "fits": {},
    "mixed": {"device_memory": "600KiB"},
    "mostly host": {"device_memory": "400KiB"},
    "host": {"arena_memory": "64KiB"},
}

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "SGD plain": (torch.optim.SGD, {"lr": 1e-1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update a small model in pieces, as a large one is."""
    monkeypatch.setattr(shares, "PIECE", 256)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-2},
    ]


def _run(
    budget: dict[str, Any] | None,
    cls: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    loop: Callable[[Any, nn.Module, torch.optim.Optimizer], Any],
    *,
    update: str = "step",
    grouped: bool = False,
) -> tuple[Any, nn.Module]:
    """Run a loop on the plain class (``budget`` None) or a chunked one; everything it leaves."""
    torch._dynamo.reset()
    model = GPT(4)
    run: Any = model
    if budget is None:
        fused = {"fused": True} if "fused" in cls.__init__.__annotations__ else {}
        optimizer = cls(_groups(model) if grouped else model.parameters(), **settings, **fused)
    else:
        pstar.manage(model, device="cpu", **budget)
        options = {"inner": "eager", "chunk_bytes": "8KiB"}
        run = torch.compile(model, backend="patrickstar", options=options)
        params = _groups(model) if grouped else None
        optimizer = pstar.ChunkedOptimizer(
            model,
            cls,
            params=params,
            update=update,  # type: ignore[arg-type]
            **settings,
        )
    log = loop(run, model, optimizer)
    left = {
        "log": log,
        "parameters": {n: copy_of(p.detach()) for n, p in model.named_parameters()},
        "optimizer": copy_of(optimizer.state_dict()),
    }
    return left, model


def _steps(count: int, *, start: int = 0) -> Callable[[Any, nn.Module, Any], list[Tensor]]:
    def loop(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for step in range(start, start + count):
            loss = next_token_loss(run, tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return loop


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_twenty_steps_equal_the_stock_class(budget: str, update: str) -> None:
    cls, settings = CLASSES["AdamW"]
    expected, _ = _run(None, cls, settings, _steps(20))
    actual, model = _run(BUDGETS[budget], cls, settings, _steps(20), update=update)
    assert_same(actual, expected)
    homes = {
        "fits": {Home.DEVICE},
        "mixed": {Home.DEVICE, Home.HOST},
        "mostly host": {Home.DEVICE, Home.HOST},
        "host": {Home.HOST},
    }
    assert engine_of(model).homes == homes[budget]
    assert_at_rest(model)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", CLASSES)
def test_other_classes_equal_the_stock_class(name: str, update: str) -> None:
    cls, settings = CLASSES[name]
    expected, _ = _run(None, cls, settings, _steps(4))
    actual, _ = _run(BUDGETS["mixed"], cls, settings, _steps(4), update=update)
    assert_same(actual, expected)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_param_groups_equal_the_stock_class(name: str, update: str) -> None:
    cls, settings = CLASSES[name]
    expected, _ = _run(None, cls, settings, _steps(4), grouped=True)
    actual, _ = _run(BUDGETS["mixed"], cls, settings, _steps(4), update=update, grouped=True)
    assert_same(actual, expected)


def _scheduled(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    seen: list[Any] = []
    for step in range(5):
        seen += _steps(1, start=step)(run, model, optimizer)
        scheduler.step()
        seen.append(scheduler.get_last_lr())
    return seen


@pytest.mark.parametrize("update", ["step", "backward"])
def test_schedulers_change_the_next_update_only(update: str) -> None:
    cls, settings = CLASSES["AdamW"]
    expected, _ = _run(None, cls, settings, _scheduled)
    actual, _ = _run(BUDGETS["mixed"], cls, settings, _scheduled, update=update)
    assert_same(actual, expected)


def _clipped(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    seen: list[Any] = []
    for step in range(5):
        next_token_loss(run, tokens(step)).backward()
        own = getattr(optimizer, "clip_grad_norm_", None)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) if own is None else own(0.5)
        optimizer.step()
        seen += [copy_of(norm), {n: copy_of(p.grad) for n, p in model.named_parameters()}]
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("budget", BUDGETS)
def test_clipping_equals_that_of_torch(budget: str) -> None:
    cls, settings = CLASSES["AdamW"]
    expected, _ = _run(None, cls, settings, _clipped)
    actual, model = _run(BUDGETS[budget], cls, settings, _clipped)
    assert_same(actual, expected)
    assert engine_of(model).updates is not None


def _accumulated(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    seen: list[Any] = []
    for step in range(4):
        for micro in range(3):
            loss = next_token_loss(run, tokens(3 * step + micro))
            (loss / 3).backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("budget", BUDGETS)
def test_accumulation_equals_that_of_torch(budget: str) -> None:
    cls, settings = CLASSES["AdamW"]
    expected, _ = _run(None, cls, settings, _accumulated)
    actual, _ = _run(BUDGETS[budget], cls, settings, _accumulated)
    assert_same(actual, expected)


def _looked_at(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    seen: list[Any] = []
    for step in range(4):
        seen += _steps(1, start=step)(run, model, optimizer)
        # Right behind a step, before its updates can be done.
        seen.append({n: copy_of(p.detach()) for n, p in model.named_parameters()})
        seen.append(copy_of(model.state_dict()))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.999)
                p.data.add_(1e-4)
        optimizer.state_dict()
        with torch.no_grad():
            seen.append(run(tokens(99)))
    return seen


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_masters_can_be_read_and_written_right_behind_a_step(budget: str, update: str) -> None:
    cls, settings = CLASSES["AdamW"]
    expected, _ = _run(None, cls, settings, _looked_at)
    actual, _ = _run(BUDGETS[budget], cls, settings, _looked_at, update=update)
    assert_same(actual, expected)


def test_states_move_between_the_stock_class_and_this_one() -> None:
    cls, settings = CLASSES["AdamW"]
    first, _ = _run(None, cls, settings, _steps(3))
    whole, _ = _run(None, cls, settings, _steps(6))

    def resumed(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        model.load_state_dict(first["parameters"], strict=False)
        optimizer.load_state_dict(copy_of(first["optimizer"]))
        return _steps(3, start=3)(run, model, optimizer)

    for budget in (None, BUDGETS["mixed"], BUDGETS["host"]):
        left, _ = _run(budget, cls, settings, resumed)
        assert_same(left["parameters"], whole["parameters"])
        assert_same(left["optimizer"], whole["optimizer"])
    chunked, _ = _run(BUDGETS["mixed"], cls, settings, _steps(3))
    assert_same(chunked["optimizer"], first["optimizer"])


def test_a_larger_batch_moves_states_and_recompiles_nothing() -> None:
    cls, settings = CLASSES["AdamW"]

    at_home: list[int] = []

    def loop(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for step, batch in enumerate((2, 2, 4, 2, 4)):
            loss = next_token_loss(run, tokens(step, batch=batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if isinstance(optimizer, pstar.ChunkedOptimizer):
                chunks = dict.fromkeys(engine_of(model).chunk_of.values())
                at_home.append(sum(c.layout.device_bytes for c in chunks))
        return losses

    expected, _ = _run(None, cls, settings, loop)
    actual, model = _run(BUDGETS["mixed"], cls, settings, loop)
    assert_same(actual, expected)
    # The larger batch takes room from states. They stay on the host then: both sizes run there.
    small, large = at_home[0], at_home[2]
    assert small > large > 0
    assert at_home == [small, small, large, large, large]
    # One graph for the first size, one for all others, each compiled once.
    assert len(engine_of(model).compiled) == 2


def test_bf16_compute_follows_fp32_masters() -> None:
    """Rounding differs where the compute copy does, not in what is updated: the first loss is
    equal, later ones differ by bf16's 8 bits.
    """
    cls, settings = CLASSES["AdamW"]
    runs = []
    for budget in ({}, BUDGETS["mixed"], BUDGETS["host"]):
        left, _ = _run({**budget, "param_dtype": torch.bfloat16}, cls, settings, _steps(8))
        runs.append(left)
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])
    assert all(v.dtype == torch.float32 for v in runs[0]["parameters"].values())


def _optimizer(update: str = "step", **settings: Any) -> tuple[Any, nn.Module, Any]:
    model = pstar.manage(GPT(2), device="cpu", arena_memory="64KiB")
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    optimizer = pstar.ChunkedOptimizer(
        model,
        torch.optim.AdamW,
        update=update,  # type: ignore[arg-type]
        **settings,
    )
    return run, model, optimizer


def test_what_cannot_work_says_so() -> None:
    model = GPT(2)
    with pytest.raises(ValueError, match="is not managed"):
        pstar.ChunkedOptimizer(model, torch.optim.AdamW)
    pstar.manage(model, device="cpu")
    with pytest.raises(ValueError, match="LBFGS searches along one direction"):
        pstar.ChunkedOptimizer(model, torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"must be a class such as torch\.optim\.AdamW"):
        pstar.ChunkedOptimizer(model, "adamw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="update must be one of step, backward, got 'later'"):
        pstar.ChunkedOptimizer(model, torch.optim.AdamW, update="later")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"1 parameters .* are not parameters of the managed model"
    ):
        pstar.ChunkedOptimizer(
            model, torch.optim.AdamW, params=[*model.parameters(), nn.Parameter(torch.ones(2))]
        )
    with pytest.raises(ValueError, match="Invalid learning rate"):
        pstar.ChunkedOptimizer(model, torch.optim.AdamW, lr=-1.0)
    pstar.ChunkedOptimizer(model, torch.optim.AdamW)
    with pytest.raises(ValueError, match="has a ChunkedOptimizer already"):
        pstar.ChunkedOptimizer(model, torch.optim.AdamW)


def test_updating_in_the_backward_refuses_what_it_cannot_do() -> None:
    run, model, optimizer = _optimizer(update="backward")
    next_token_loss(run, tokens(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="accumulating gradients over several backward passes"):
        next_token_loss(run, tokens(1)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="clip_grad_norm_ needs the norm of all gradients"):
        optimizer.clip_grad_norm_(1.0)
    direct = sum(p.square().sum() for p in model.parameters())
    (next_token_loss(run, tokens(1)) + direct).backward()
    with pytest.raises(RuntimeError, match="gets another gradient from outside"):
        optimizer.step()


def test_an_error_in_an_update_reaches_the_caller() -> None:
    run, model, optimizer = _optimizer(lr=1e-2)
    next_token_loss(run, tokens(0)).backward()
    optimizer.param_groups[0]["betas"] = "wrong"
    with pytest.raises(ValueError, match="unpack"):
        optimizer.step()
        next(iter(model.parameters())).sum()
