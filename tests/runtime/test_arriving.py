"""``p.grad`` while its copy is still on the way."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Kind
from pstar_compile.runtime.cpu import CpuStreams
from pstar_compile.runtime.streams import Event

Pairs = Sequence[tuple[Tensor, Tensor]]

OFFLOAD = Kind.OFFLOAD
LAYERS = 4
ARENA = 2 * 64 * 4


class Gate:
    """Holds a backward's last offload back while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def wait_host(self) -> None:
        if not self.opened.wait(timeout=20):
            raise TimeoutError("the gate was never opened")

    def reached(self) -> bool:
        return self.opened.is_set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    offload = CpuStreams.offload
    offloads = 0

    def held(self: CpuStreams, pairs: Pairs, after: Sequence[Event]) -> Event:
        nonlocal offloads
        offloads += 1
        return offload(self, pairs, after if offloads % LAYERS else [*after, gate])

    monkeypatch.setattr(CpuStreams, "offload", held)
    return gate


def _layers(*, tied: bool = False) -> nn.Sequential:
    """With ``tied``, the first layer runs twice: its gradient comes in two parts."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers, layers[0]) if tied else nn.Sequential(*layers)


def _managed(*, tied: bool = False) -> tuple[nn.Sequential, Callable[[Tensor], Tensor]]:
    model = pstar.manage(_layers(tied=tied), device="cpu", arena_memory=ARENA)
    options = {"inner": "eager", "chunk_bytes": 256}
    return model, torch.compile(model, backend="patrickstar", options=options)


def _expected(*inputs: Tensor, tied: bool = False) -> list[Tensor]:
    model = _layers(tied=tied)
    for x in inputs:
        model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _same(model: nn.Module, expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


X, Y = torch.linspace(-1, 1, 16).view(2, 8), torch.linspace(0, 3, 16).view(2, 8)


def test_backward_does_not_wait_and_every_reader_does(gate: Gate) -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    model.zero_grad()
    gate.opened.clear()
    run(X).square().sum().backward()
    read: list[Any] = []
    readers = [
        threading.Thread(target=lambda: read.append(model[0].weight.grad), daemon=True)
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    readers[0].join(timeout=0.2)
    assert all(reader.is_alive() for reader in readers)
    gate.opened.set()
    for reader in readers:
        reader.join(timeout=60)
    assert len(read) == 3 and all(torch.equal(g, _expected(X)[0]) for g in read)
    assert _same(model, _expected(X))


def _places(run: Callable[[Tensor], Tensor]) -> dict[int | None, int | None]:
    return {a.chunk: a.offset for a in pstar.last_plan(run).schedule.actions if a.kind is OFFLOAD}


def test_the_next_step_does_not_overtake_an_offload_from_the_arena(gate: Gate) -> None:
    model, run = _managed(tied=True)
    run(X).square().sum().backward()
    assert _places(run)[0] is not None
    model.zero_grad()
    gate.opened.clear()
    run(X).square().sum().backward()
    threading.Timer(0.3, gate.opened.set).start()
    run(Y)
    assert _same(model, _expected(X, tied=True))


@pytest.mark.parametrize("another_plan", [False, True])
def test_the_next_step_waits_before_a_gradient_is_discarded(gate: Gate, another_plan: bool) -> None:
    model, run = _managed()
    with torch.no_grad():
        run(X)
    run(X).square().sum().backward()
    assert _places(run)[0] is None
    model.zero_grad()
    gate.opened.clear()
    run(X).square().sum().backward()
    done: list[Tensor] = []

    def next_step() -> None:
        with torch.set_grad_enabled(not another_plan):
            done.append(run(Y))

    step = threading.Thread(target=next_step, daemon=True)
    step.start()
    step.join(timeout=0.2)
    assert step.is_alive()
    gate.opened.set()
    step.join(timeout=60)
    assert torch.equal(done[0], _layers()(Y)) and _same(model, _expected(X))


def test_a_step_whose_gradients_nobody_reads(gate: Gate) -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    run(Y).square().sum().backward()
    assert _same(model, _expected(Y))


def test_two_backwards_before_anybody_reads() -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    run(Y).square().sum().backward()
    assert _same(model, _expected(X, Y))


def test_a_tensor_that_somebody_holds_is_accumulated_before_backward_returns() -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    held = [p.grad for p in model.parameters()]
    run(Y).square().sum().backward()
    for grad, expected in zip(held, _expected(X, Y), strict=True):
        assert torch.equal(grad, expected)


def test_a_loss_of_the_masters_between_backward_and_reading() -> None:
    model, run = _managed()
    plain = _layers()
    for each, forward in ((model, run), (plain, plain)):
        forward(X).square().sum().backward()
        sum(p.square().sum() for p in each.parameters()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Each gradient is a sum of two terms, and two terms add up alike in either order.
        assert torch.equal(ours.grad, theirs.grad)


def test_hooks_see_the_gradient_during_backward() -> None:
    model, run = _managed()
    seen: list[Tensor] = []
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run(X).square().sum().backward()
    assert torch.equal(seen[0], _expected(X)[1])


def test_masters_stay_parameters() -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert type(copy.deepcopy(weight)) is nn.Parameter
    assert type(weight.detach()) is Tensor
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded) is nn.Parameter and torch.equal(loaded, weight)
    assert {type(t) for t in model.state_dict().values()} == {Tensor}
    del weight.grad
    assert weight.grad is None
    pstar.unmanage(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert _same(nn.Sequential(*list(model)[1:]), _expected(X)[1:])


def test_a_compiled_function_reads_masters_and_gradients() -> None:
    model, run = _managed()
    run(X).square().sum().backward()

    @torch.compile(backend="eager")
    def norms(parameters: list[nn.Parameter]) -> Tensor:
        return torch.stack([p.sum() * p.grad.sum() for p in parameters if p.grad is not None])

    found = norms(list(model.parameters()))
    sums = [w.sum() * g.sum() for w, g in zip(_layers().parameters(), _expected(X), strict=True)]
    assert torch.equal(found, torch.stack(sums))


def test_a_hook_registered_after_backward_is_for_the_next_one() -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    assert _same(model, _expected(X))


def test_a_refused_gradient_leaves_the_one_that_comes() -> None:
    model, run = _managed()
    run(X).square().sum().backward()
    with pytest.raises(RuntimeError):
        model[0].weight.grad = torch.ones(3)
    assert _same(model, _expected(X))
