"""Models built on the meta device: values, identity, ties, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pstar_compile as pstar


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Scaled(nn.Module):
    """A module with parameters and a buffer of its own beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.frozen = nn.Parameter(torch.empty(2, 4), requires_grad=False)
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.normal_(self.frozen)
        self.table.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def _convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 4), nn.LayerNorm(4)),
        lambda: nn.Sequential(Scaled(), Scaled()),
        lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Transformer(8, 2, 1, 1, 16),
        _convnet,
    ],
    ids=["leaves", "parents", "lstm", "attention", "transformer", "convnet"],
)
def test_the_values_are_those_of_a_model_built_with_memory(
    build: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(3)
    expected = build()
    model = _on_meta(build)
    torch.manual_seed(3)
    pstar.manage(model, device="cpu")
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    if isinstance(expected, nn.Transformer):
        # It draws all values again at its end, from wherever the generator then is: its layers are
        # copies of one there, and each draws for itself here.
        assert all(
            (v == 0).all() == (found[k] == 0).all() for k, v in expected.state_dict().items()
        )
    else:
        for key, value in expected.state_dict().items():
            assert torch.equal(found[key], value), key


def test_the_model_trains_like_one_built_with_memory() -> None:
    def losses(model: nn.Module) -> list[float]:
        pstar.manage(model, device="cpu", device_memory="64KiB")
        run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
        optimizer = pstar.ChunkedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        found = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            loss = run(torch.randn(5, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(), nn.Linear(8, 8))
    model = _on_meta(lambda: nn.Sequential(Scaled(), nn.Linear(8, 8)))
    torch.manual_seed(0)
    assert losses(model) == losses(plain)


def test_parameters_stay_the_objects_that_they_are() -> None:
    model = _on_meta(lambda: nn.Sequential(Scaled(), nn.LSTM(8, 8)))
    model[0].scale.decay = False  # type: ignore[union-attr]
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, lr=0.1)
    pstar.manage(model, device="cpu")
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert [type(p) for p in before] == [nn.Parameter] * len(before)
    assert model[0].scale.decay is False  # type: ignore[union-attr]
    assert not model[0].frozen.requires_grad
    assert not any(t.is_meta for t in model.state_dict().values())
    assert torch.equal(model[0].table, torch.arange(4.0))
    output, _ = model[1](torch.ones(3, 8))
    assert output.isfinite().all()


def test_a_tied_parameter_is_made_once_with_its_first_owners_values() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
        model[1].weight = model[0].weight
        return model

    model = _on_meta(build)
    torch.manual_seed(5)
    pstar.manage(model, device="cpu")
    torch.manual_seed(5)
    expected = nn.Embedding(10, 8).weight
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight, expected)
    assert model[1].bias.isfinite().all()


def test_what_has_memory_keeps_its_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), Scaled())
    model[2].linear = _on_meta(lambda: nn.Linear(8, 8))
    model[0].bias = nn.Parameter(torch.empty(4, device="meta"))
    before = copy.deepcopy({k: v for k, v in model.state_dict().items() if not v.is_meta})
    pstar.manage(model, device="cpu")
    after = model.state_dict()
    assert len(before) == 3
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    assert all(v.isfinite().all() for v in after.values())


def test_modules_without_an_initialisation_are_named_before_anything_is_made() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.zeros(4))
            self.register_buffer("table", torch.zeros(4))

    model = _on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Silent()))
    with pytest.raises(ValueError) as error:
        pstar.manage(model, device="cpu")
    for part in ("Silent '1' (weight, table)", "reset_parameters()", "load_safetensors"):
        assert part in str(error.value)
    assert "Linear" not in str(error.value)
    assert all(p.is_meta for p in model.parameters())
    assert type(model) is nn.Sequential


def test_an_initialisation_that_leaves_something_out_is_refused() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.set = nn.Parameter(torch.empty(4))
            self.forgotten = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.set)

    with pytest.raises(ValueError, match=r"Forgetful\) leaves 'forgotten' without a value"):
        pstar.manage(_on_meta(Forgetful), device="cpu")
