"""The loops people write: each one trains exactly as on the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pstar_compile as pstar
from passes.plan import Home
from pstar_compile.managed import engine_of
from tests.training import (
    GPT,
    MLP,
    Recorder,
    adamw,
    assert_at_rest,
    assert_same,
    assert_trains_like_eager,
    copy_of,
    gradients,
    managed,
    next_token_loss,
    record,
    rows,
    state_of,
    tokens,
)

ARENA = "13KiB"
"""Three of the chunks of an :class:`MLP`."""


def _loss(run: Any, step: int) -> Tensor:
    loss: Tensor = (run(rows(step)) - 0.5).square().mean()
    return loss


def _step(run: Any, recorder: Recorder, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = _loss(run, step)
    loss.backward()
    recorder.keep(loss)
    optimizer.step()
    optimizer.zero_grad()


def _check(loop: Any, build: Any = MLP, **settings: Any) -> tuple[Any, Any]:
    return assert_trains_like_eager(build, loop, **{"arena": ARENA, **settings})


def test_accumulation_over_micro_batches() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            for micro in range(4):
                loss = next_token_loss(run, tokens(4 * step + micro)) / 4
                loss.backward()
                recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop, GPT, arena="64KiB")


def test_clipping_the_gradient_norm() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(3):
            before = state_of(model)["parameters"]
            (_loss(run, step) * 100).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            recorder.keep(norm)
            optimizer.step()
            optimizer.zero_grad()
            after = state_of(model)["parameters"]
            change = torch.stack([(after[n] - before[n]).double().norm() for n in after]).norm()
            assert change.item() == pytest.approx(1e-3, rel=1e-3)
        return optimizer

    _check(loop)


def test_gradients_can_be_read_and_edited_before_the_step() -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            _loss(run, step).backward()
            recorder.keep([p.grad.norm() for p in model.parameters()])
            model.layers[0].weight.grad.mul_(0.5)
            model.layers[1].weight.grad.zero_()
            model.layers[2].weight.grad = torch.ones_like(model.layers[2].weight)
            model.layers[3].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_freezing_and_unfreezing() -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        layer = model.layers[2]
        layer.requires_grad_(False)
        optimizer = adamw(nn.ModuleList(m for m in model.layers if m is not layer))
        for step in range(9):
            if step == 3:
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters())})
            if step == 6:
                layer.requires_grad_(False)
            _step(run, recorder, optimizer, step)
        grads = [log[1]["layers.2.weight"] for log in recorder.log]
        assert [g is None for g in grads] == [True] * 3 + [False] * 3 + [True] * 3
        return optimizer

    _check(loop)


@pytest.mark.parametrize("first", [False, True], ids=["between", "before"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, None])
def test_evaluation_between_and_before_training(context: Any, first: bool) -> None:
    def evaluate(run: Any, model: nn.Module, recorder: Recorder) -> None:
        model.eval()
        for batch in (90, 91):
            if context is None:
                recorder.keep(run(rows(batch)))
            else:
                with context():
                    recorder.keep(run(rows(batch)))
        model.train()

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(6):
            if (first and step == 0) or step == 3:
                evaluate(run, model, recorder)
            _step(run, recorder, optimizer, step)
        evaluate(run, model, recorder)
        assert not any(p.is_inference() for p in model.parameters())
        return optimizer

    plain, other = MLP(), MLP()
    expected = record(loop, plain, plain)
    compiled, model = managed(other, arena=ARENA)
    assert_same(record(loop, compiled, model), expected)
    assert not engine_of(model).running
    if context is not None:
        assert_at_rest(model)
        assert not engine_of(model).resident, "an inference call leaves nothing resident"


def test_evaluation_sees_the_new_weights() -> None:
    saved = state_of(MLP(seed=7))["parameters"]

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        with torch.no_grad():
            recorder.keep(run(rows(50)))
        _step(run, recorder, optimizer, 0)
        with torch.no_grad():
            recorder.keep(run(rows(50)))
        model.load_state_dict(saved, strict=False)
        with torch.no_grad():
            recorder.keep(run(rows(50)))
        first, _, second, third = (log[0][0] for log in recorder.log)
        assert not torch.equal(first, second) and not torch.equal(second, third)
        return optimizer

    _check(loop)


def test_losses_without_a_backward() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(15):
            if step % 3 == 2:
                recorder.keep(_loss(run, step))
            else:
                _step(run, recorder, optimizer, step)
        _step(run, recorder, optimizer, 15)
        return optimizer

    _check(loop)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_forwards_then_two_backwards(reverse: bool) -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            losses = [_loss(run, 2 * step), _loss(run, 2 * step + 1)]
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
                recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_the_sum_of_two_forwards() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            (_loss(run, step) + _loss(run, step + 10)).backward()
            recorder.keep()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_a_second_backward_of_a_retained_graph() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            loss = _loss(run, step)
            loss.backward(retain_graph=True)
            recorder.keep(loss)
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_double_backward_is_refused_and_training_goes_on() -> None:
    compiled, model = managed(MLP(), arena=ARENA)
    plain = MLP()
    x = rows(0).requires_grad_()
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        (grad,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    plain.calls.add_(1)
    assert all(p.grad is None for p in model.parameters())

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            _step(run, recorder, optimizer, step)
        return optimizer

    assert_same(record(loop, compiled, model), record(loop, plain, plain))
    assert_at_rest(model)


def test_an_l2_term_on_the_parameters() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            penalty = sum(p.pow(2).sum() for p in model.parameters())
            loss = _loss(run, step) + 1e-3 * penalty
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_weight_decay_groups() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.3, "lr": 1e-2},
                {"params": plain, "weight_decay": 0.0, "lr": 3e-2},
            ]
        )
        for step in range(4):
            _step(run, recorder, optimizer, step)
        return optimizer

    _check(loop)


def test_half_the_parameters_and_a_tensor_of_ones_own() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        free = torch.ones(32, requires_grad=True)
        optimizer = torch.optim.AdamW([*list(model.parameters())[::2], free], lr=1e-2)
        for step in range(4):
            loss = (run(rows(step)) * free).square().mean()
            loss.backward()
            recorder.keep(loss, free, free.grad)
            optimizer.step()
            model.zero_grad()
            free.grad = None
        return optimizer

    _check(loop)


def test_a_scheduler_compiles_nothing_anew() -> None:
    compiles: list[int] = []

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        for step in range(30):
            _step(run, recorder, optimizer, step)
            scheduler.step()
            compiles.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return optimizer

    torch._dynamo.utils.counters.clear()
    _check(loop)
    assert compiles[30:] == [1] * 30


def test_autograd_grad_leaves_the_parameters_gradients_alone() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            x = rows(step).requires_grad_()
            recorder.keep(torch.autograd.grad(run(x).square().mean(), x))
            assert all(p.grad is None for p in model.parameters())
            _loss(run, step).backward()
            recorder.keep()
            recorder.keep(torch.autograd.grad(run(x).square().mean(), x))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop)


def test_gradients_of_the_inputs() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        for step in range(3):
            x = rows(step).requires_grad_()
            run(x).square().mean().backward()
            recorder.keep(x.grad)

    _check(loop)


def test_zero_grad_to_zero() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        kept: dict[str, int] = {}
        for step in range(4):
            loss = _loss(run, step)
            loss.backward()
            recorder.keep(loss)
            now = {n: p.grad.data_ptr() for n, p in model.named_parameters()}
            assert not kept or now == kept, "the same tensors, as in eager"
            kept = now
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return optimizer

    _check(loop)


def test_gradients_that_the_user_keeps_do_not_change() -> None:
    compiled, model = managed(MLP(), arena=ARENA)
    optimizer = adamw(model)
    kept: list[tuple[Any, Any]] = []
    for step in range(5):
        _loss(compiled, step).backward()
        now = {n: p.grad[..., :7] for n, p in model.named_parameters()}
        kept.append((now, copy_of(now)))
        optimizer.step()
        optimizer.zero_grad()
    for tensors, values in kept:
        assert_same(tensors, values)


def test_gradient_hooks() -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        seen: list[Tensor] = []
        weight, bias = model.layers[0].weight, model.layers[3].bias
        handles = [
            weight.register_hook(lambda grad: seen.append(grad.clone())),
            weight.register_hook(lambda grad: grad * 2),
            bias.register_hook(lambda grad: grad + 1),
        ]
        for step in range(4):
            if step == 3:
                for handle in handles:
                    handle.remove()
            _step(run, recorder, optimizer, step)
        recorder.keep(seen)
        assert len(seen) == 3
        return optimizer

    _check(loop)


def test_an_optimizer_in_the_backward() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        names = {p: n for n, p in model.named_parameters()}
        fired: list[str] = []

        def update(parameter: Tensor) -> None:
            fired.append(names[parameter])
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        for step in range(5):
            fired.clear()
            loss = _loss(run, step)
            loss.backward()
            recorder.keep(loss)
            assert sorted(fired) == sorted(names.values()), "each once"
        for handle in handles:
            handle.remove()
        return list(optimizers.values())

    _check(loop)


class _Boom(RuntimeError):
    pass


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise _Boom


def _fail_in_forward(run: Any, model: Any, recorder: Recorder) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        run(torch.ones(4, 31))


def _fail_behind_the_model(run: Any, model: Any, recorder: Recorder) -> None:
    with pytest.raises(_Boom):
        _FailingBackward.apply(run(rows(77))).sum().backward()


def _fail_before_the_model(run: Any, model: Any, recorder: Recorder) -> None:
    x = rows(77).requires_grad_()
    with pytest.raises(_Boom):
        run(_FailingBackward.apply(x)).sum().backward()
    # Which gradients eager has already accumulated by then is its own affair.
    model.zero_grad()


@pytest.mark.parametrize("fail", [_fail_in_forward, _fail_behind_the_model, _fail_before_the_model])
def test_training_goes_on_after_an_exception(fail: Any) -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(6):
            if step in (2, 4):
                calls = model.calls.clone()
                fail(run, model, recorder)
                model.calls.copy_(calls)
            _step(run, recorder, optimizer, step)
        return optimizer

    _check(loop)


def test_training_goes_on_after_an_exception_in_a_hook() -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        optimizer = adamw(model)

        def explode(grad: Tensor) -> None:
            raise _Boom

        for step in range(6):
            if step in (2, 4):
                handle = model.layers[1].weight.register_hook(explode)
                with pytest.raises(_Boom):
                    _loss(run, step).backward()
                handle.remove()
                model.zero_grad()
            _step(run, recorder, optimizer, step)
        return optimizer

    _check(loop)


class _TwoHeads(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor, labels: bool = True) -> Tensor:
        x = super().forward(x)
        out = self.main(x)
        return out + self.extra(x) if labels else out


def test_a_head_that_one_batch_skips() -> None:
    def loop(run: Any, model: Any, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(4):
            loss = run(rows(step), labels=step != 2).square().mean()
            loss.backward()
            assert (model.extra.weight.grad is None) == (step == 2)
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop, _TwoHeads)


def test_nan_passes_through() -> None:
    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            x = rows(step)
            if step == 1:
                x[0, 0] = float("nan")
            loss = run(x).square().mean()
            loss.backward()
            recorder.keep(loss.isnan(), [p.grad.isnan() for p in model.parameters()])
            if step:
                # Whether it is a NaN counts, not which one.
                recorder.log[-1] = recorder.log[-1][0]
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.isnan().any() for p in model.parameters())
        return None

    plain = MLP()
    expected = record(loop, plain, plain)
    compiled, model = managed(MLP(), arena=ARENA)
    actual = record(loop, compiled, model)
    assert_same(actual["log"], expected["log"])
    for name, parameter in actual["parameters"].items():
        assert_same(parameter.isnan(), expected["parameters"][name].isnan())


def test_the_whole_step_compiled() -> None:
    """A compiled optimizer rounds otherwise than an eager one, so torch's own compiled step, run
    on the plain module, is what must come out bit for bit.
    """

    def train(model: nn.Module, backend: str, **options: Any) -> Any:
        torch._dynamo.reset()
        optimizer = adamw(model)

        def train_step(x: Tensor) -> Tensor:
            loss: Tensor = (model(x) - 0.5).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = torch.compile(train_step, backend=backend, options=options or None)
        return [copy_of(compiled(rows(step))) for step in range(3)], state_of(model)

    eager = MLP()
    optimizer = adamw(eager)
    for step in range(3):
        _loss(eager, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = pstar.manage(MLP(), device="cpu", arena_memory=ARENA)
    actual = train(model, "patrickstar", inner="eager")
    assert_same(actual, train(MLP(), "aot_eager"))
    torch.testing.assert_close(
        actual[1]["parameters"], state_of(eager)["parameters"], rtol=1e-4, atol=1e-5
    )
    assert engine_of(model).homes == {Home.HOST}
    assert_at_rest(model)


def test_a_parameter_written_between_forward_and_backward() -> None:
    compiled, model = managed(MLP(), arena=ARENA)
    plain = MLP()
    _loss(compiled, 0).backward()
    before = gradients(model)
    loss = _loss(compiled, 1)
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place.*layers\.1\.weight"):
        loss.backward()
    assert_same(gradients(model), before)
    with torch.no_grad():
        model.layers[1].weight.copy_(plain.layers[1].weight)
    model.zero_grad()
    plain.calls.fill_(2)
    for run in (compiled, plain):
        _loss(run, 2).backward()
    assert_same(state_of(model), state_of(plain))
    assert_at_rest(model)


def test_a_parameter_written_before_the_backward_of_the_other_forward() -> None:
    compiled, model = managed(MLP(), arena=ARENA)
    first, second = _loss(compiled, 0), _loss(compiled, 1)
    second.backward()
    adamw(model).step()
    with pytest.raises(RuntimeError, match="modified in place"):
        first.backward()


def test_cross_entropy_inside_the_compiled_region() -> None:
    class WithLoss(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            logits = super().forward(ids[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Any:
        optimizer = adamw(model)
        for step in range(3):
            loss = run(tokens(step))
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    _check(loop, WithLoss, arena="64KiB")
