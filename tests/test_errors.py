"""Every error says what was required, what was got, and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import pstar_compile as pstar
from passes.plan import PlanError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def _compile(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="patrickstar", options={"inner": "eager", **options})


def _refused(call: Callable[[], Any], kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    # Nothing of the machinery shows below "caused by".
    assert caught.value.__cause__ is None or not isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("name", ["device_memory", "arena_memory"])
@pytest.mark.parametrize("size", ["20GiBi", "much", -5, 0, True])
def test_unreadable_size(name: str, size: Any) -> None:
    model = _model()
    _refused(
        lambda: pstar.manage(model, device="cpu", **{name: size}),
        ValueError, name, "positive number of bytes", "'20GiB'", repr(size),
    )  # fmt: skip
    assert type(model) is nn.Sequential, "a refused model is unchanged"


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:x", "", 1.5])
def test_unknown_device(device: Any) -> None:
    _refused(
        lambda: pstar.manage(_model(), device=device),
        ValueError, "'cpu', 'cuda' or 'cuda:<n>'", "got", str(device),
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda() -> None:
    _refused(
        lambda: pstar.manage(_model(), device="cuda"),
        ValueError, "'cuda'", "sees no CUDA device", "device='cpu'",
    )  # fmt: skip


def test_not_a_module() -> None:
    _refused(lambda: pstar.manage(torch.zeros(2)), TypeError, "torch.nn.Module", "got Tensor")


def test_param_dtype_must_be_floating() -> None:
    _refused(
        lambda: pstar.manage(_model(), device="cpu", param_dtype=torch.int8),
        ValueError, "param_dtype", "floating-point", "torch.int8",
    )  # fmt: skip


def test_managing_twice() -> None:
    model = pstar.manage(_model(), device="cpu")
    _refused(lambda: pstar.manage(model), ValueError, "already managed", "unmanage")
    outer = nn.Sequential(nn.Linear(2, 2), model)
    _refused(lambda: pstar.manage(outer), ValueError, "submodule '1'", "already managed")


def test_managing_a_compiled_model() -> None:
    compiled = torch.compile(_model(), backend="eager")
    _refused(
        lambda: pstar.manage(compiled),
        ValueError, "plain module", "call manage(model) before torch.compile(model)",
    )  # fmt: skip


def test_a_parameter_replaced_after_manage() -> None:
    for mode in ("eager", "compiled", "compiled before"):
        torch._dynamo.reset()
        model = pstar.manage(_model(), device="cpu")
        run = model if mode == "eager" else _compile(model)
        if mode == "compiled before":
            run(torch.ones(2, 16)).sum().backward()
        model[2].weight = nn.Parameter(torch.zeros(16, 16))
        _refused(
            lambda run=run: run(torch.ones(2, 16)),
            RuntimeError, "'2.weight'", "replaced after pstar_compile.manage", "unmanage(model)",
        )  # fmt: skip


def test_a_parameter_whose_shape_changed() -> None:
    for mode in ("eager", "compiled", "compiled before"):
        torch._dynamo.reset()
        model = pstar.manage(_model(), device="cpu")
        run = model if mode == "eager" else _compile(model)
        if mode == "compiled before":
            run(torch.ones(2, 16)).sum().backward()
        model[2].weight.data = torch.zeros(8, 16)
        _refused(
            lambda run=run: run(torch.ones(2, 16)),
            RuntimeError, "'2.weight'", "(16, 16)", "(8, 16)", "unmanage(model)",
        )  # fmt: skip


def test_problems_are_collected_in_one_message() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(3)
            self.expanded = nn.Parameter(torch.zeros(1, 4).expand(3, 4))
            base = torch.zeros(10)
            self.left = nn.Parameter(base[:6])
            self.right = nn.Parameter(base[4:])

    model = Odd()
    _refused(
        lambda: pstar.manage(model, device="cpu"),
        ValueError,
        "this model cannot be managed:",
        "parameter 'lazy.weight' is not initialised yet", "run the model once",
        "parameter 'expanded' repeats its memory", "contiguous",
        "'left' and 'right' are different tensors on the same memory", "one nn.Parameter",
    )  # fmt: skip
    assert type(model) is Odd


def test_an_inference_mode_parameter() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    _refused(lambda: pstar.manage(model, device="cpu"), ValueError, "'weight'", "inference mode")


def test_a_script_module() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    _refused(lambda: pstar.manage(scripted, device="cpu"), ValueError, "ScriptModule")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"prefech": 1}, ["unknown option 'prefech'", "did you mean 'prefetch'", "known options"]),
        ({"prefetch": -2}, ["'prefetch'", "got -2"]),
        ({"inner": "fast"}, ["'inner'", "inductor, eager", "'fast'"]),
        ({"chunk_bytes": "x"}, ["'chunk_bytes'", "'20GiB'"]),
        ({"trust_version_counters": 0}, ["'trust_version_counters'", "True or False"]),
    ],
)
def test_bad_backend_options_reach_the_caller(options: dict[str, Any], parts: list[str]) -> None:
    compiled = _compile(pstar.manage(_model(), device="cpu"), **options)
    with pytest.raises(Exception) as caught:
        compiled(torch.ones(2, 16))
    for part in parts:
        assert part in str(caught.value)


def test_asking_what_an_unmanaged_model_did() -> None:
    model = _model()
    for call in (pstar.stats, pstar.unmanage):
        _refused(
            lambda call=call: call(model), ValueError, "Sequential is not managed", "manage(model)"
        )
    _refused(lambda: pstar.last_plan(model), ValueError, "no plan yet", "backend='patrickstar'")
    pstar.manage(model, device="cpu")
    _refused(lambda: pstar.last_plan(model), ValueError, "no plan yet")


def test_a_freed_or_unmanaged_models_graph_is_refused() -> None:
    model = pstar.manage(_model(), device="cpu", arena_memory=2048)
    kept = []

    class Keep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return x

    loss = model(torch.ones(2, 16)).sum()
    pstar.unmanage(model)
    _refused(loss.backward, RuntimeError, "unmanaged", "pstar_compile.manage")


def test_two_managed_models_in_one_graph() -> None:
    teacher = pstar.manage(_model(), device="cpu")
    student = pstar.manage(_model(), device="cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        return (teacher(x) - student(x)).square().sum()

    compiled = _compile(step)  # type: ignore[arg-type]
    with pytest.raises(Exception) as caught:
        compiled(torch.ones(2, 16))
    assert "several managed models" in str(caught.value)
    assert "torch.compile(teacher)" in str(caught.value)


def test_an_optimizer_that_also_holds_foreign_parameters_works() -> None:
    plain = _model()
    foreign = nn.Parameter(torch.ones(3))
    other = nn.Parameter(torch.ones(3))
    managed = pstar.manage(copy.deepcopy(plain), device="cpu", arena_memory=2048)
    compiled = _compile(managed)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    for run, model, extra in ((plain, plain, foreign), (compiled, managed, other)):
        optimizer = torch.optim.Adam([*model.parameters(), extra], lr=0.1)
        for _ in range(3):
            (run(x).sum() * extra.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(foreign, other)
    for p, q in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(p, q)


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(6).reshape(2, 3), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.flag, x @ (self.codes * self.scale), x.sum())


@pytest.mark.parametrize("param_dtype", [None, torch.float64])
def test_integer_parameters_work(param_dtype: torch.dtype | None) -> None:
    plain = _Table()
    managed = pstar.manage(
        copy.deepcopy(plain), device="cpu", arena_memory=2048, param_dtype=param_dtype
    )
    x = torch.ones(2, 2)
    if param_dtype is not None:
        x = x.double()
        plain.scale.data = plain.scale.data.double()
    plain(x).sum().backward()
    for run in (managed, _compile(managed)):
        managed.zero_grad()
        run(x).sum().backward()
        assert managed.codes.dtype is torch.int64 and managed.codes.grad is None
        assert torch.equal(managed.scale.grad.to(plain.scale.dtype), plain.scale.grad)


def test_on_demand_parameter_larger_than_the_budget() -> None:
    model = pstar.manage(_model(), device="cpu", device_memory=512)
    _refused(
        lambda: model(torch.ones(2, 16)),
        ValueError, "'0.weight'", "1024 bytes", "512 bytes", "raise device_memory",
    )  # fmt: skip


def _plan_error(call: Callable[[], Any]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("setting", ["device_memory", "arena_memory"])
@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_a_budget_that_is_too_small_names_the_smallest_that_works(
    setting: str, prefetch: int | None
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    x = torch.ones(4, 32)

    def train(nbytes: int) -> None:
        torch._dynamo.reset()
        model = pstar.manage(copy.deepcopy(plain), device="cpu", **{setting: nbytes})
        _compile(model, prefetch=prefetch)(x).sum().backward()
        if setting == "device_memory":
            assert pstar.last_plan(model).peak_device_bytes <= nbytes
        assert pstar.stats(model).arena_peak_bytes <= nbytes

    error = _plan_error(lambda: train(2048))
    message = str(error)
    assert error.moment is not None and f"at moment {error.moment}" in message
    assert str(error.needed_bytes) in message and str(error.available_bytes) in message
    assert setting in message and "raise" in message
    assert error.smallest_budget is not None and str(error.smallest_budget) in message
    assert error.smallest_budget > 2048
    train(error.smallest_budget)
    _plan_error(lambda: train(error.smallest_budget - 256))


@pytest.mark.parametrize("setting", ["device_memory", "arena_memory"])
@pytest.mark.parametrize("widths", [(48, 8, 64, 24), (16, 64, 16, 16, 32, 8), (64, 64, 8, 48, 8)])
def test_the_smallest_budget_is_the_smallest_of_any_chunking(
    setting: str, widths: tuple[int, ...]
) -> None:
    def train(nbytes: int) -> None:
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
        pstar.manage(model, device="cpu", **{setting: nbytes})
        _compile(model)(torch.ones(4, widths[0])).sum().backward()

    smallest = _plan_error(lambda: train(512)).smallest_budget
    assert smallest is not None
    train(smallest)
    for percent in (97, 90, 80):
        _plan_error(lambda percent=percent: train(smallest * percent // 100))


@pytest.mark.parametrize("setting", ["device_memory", "arena_memory"])
def test_chunks_that_are_too_large_by_option(setting: str) -> None:
    plain = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])

    def train(nbytes: int | str, **options: Any) -> None:
        torch._dynamo.reset()
        model = pstar.manage(copy.deepcopy(plain), device="cpu", **{setting: nbytes})
        _compile(model, **options)(torch.ones(4, 32)).sum().backward()

    error = _plan_error(lambda: train("20KiB", chunk_bytes="40KiB"))
    found = re.search(
        rf"option chunk_bytes is 40960 bytes; without it the step fits, in chunks of at most "
        rf"\d+ bytes\. Or: {setting} is 20480 bytes.* raise",
        str(error),
    )
    assert found, error
    train("20KiB")
    assert error.smallest_budget is not None
    train(error.smallest_budget, chunk_bytes="40KiB")
    assert "chunk_bytes" not in str(_plan_error(lambda: train("2KiB", chunk_bytes="40KiB")))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_batch_too_large_for_what_fitted(dynamic: bool | None) -> None:
    def model(nbytes: int) -> Any:
        torch._dynamo.reset()
        layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        pstar.manage(layers, device="cpu", device_memory=nbytes)
        options = {"inner": "eager"}
        return torch.compile(layers, backend="patrickstar", options=options, dynamic=dynamic)

    def train(compiled: Any, rows: int) -> None:
        compiled(torch.ones(rows, 8)).sum().backward()

    compiled = model(64 * 1024)
    train(compiled, 4)
    error = _plan_error(lambda: train(compiled, 4096))
    assert str(64 * 1024) in str(error) and "smaller batch" in str(error)
    assert error.smallest_budget is not None
    train(compiled, 4)
    train(model(error.smallest_budget), 4096)
