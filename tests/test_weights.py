"""Weights from safetensors files, into managed models and into models on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pstar_compile as pstar

save_file = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    model[2].weight = model[0].weight
    return model


@pytest.fixture
def source() -> nn.Module:
    torch.manual_seed(1)
    model = _tied()
    model[1].running_mean.normal_()
    return model


def _tensors(source: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in source.state_dict().items() if k != "2.weight"}


def _write(source: nn.Module, directory: Path) -> Path:
    path = directory / "model.safetensors"
    save_file(_tensors(source), path)
    return path


def _write_sharded(source: nn.Module, directory: Path) -> Path:
    names: dict[str, str] = {}
    for part, keys in enumerate((["0.weight", "1.weight"], None)):
        tensors = _tensors(source)
        keys = keys or [k for k in tensors if k not in names]
        file = f"model-{part}.safetensors"
        save_file({k: tensors[k] for k in keys}, directory / file)
        names |= dict.fromkeys(keys, file)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def _assert_equal(model: nn.Module, source: nn.Module) -> None:
    for key, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("write", [_write, _write_sharded])
@pytest.mark.parametrize("by", ["file", "directory"])
def test_a_managed_model_gets_the_weights(
    source: nn.Module, tmp_path: Path, write: object, by: str
) -> None:
    path = write(source, tmp_path)  # type: ignore[operator]
    model = pstar.manage(_tied(), device="cpu", device_memory="64KiB")
    run = torch.compile(model, backend="patrickstar", options={"inner": "eager"})
    tokens = torch.arange(10)
    run(tokens).sum().backward()
    masters = list(model.parameters())
    pstar.load_safetensors(run, path if by == "file" else tmp_path)
    _assert_equal(model, source)
    assert all(p is q for p, q in zip(model.parameters(), masters, strict=True))
    assert torch.equal(run.eval()(tokens), source.eval()(tokens))


def test_a_model_on_the_meta_device_gets_memory_with_the_weights(
    source: nn.Module, tmp_path: Path
) -> None:
    path = _write(source, tmp_path)
    with torch.device("meta"):
        model = _tied()
    parameters = list(model.parameters())
    pstar.load_safetensors(model, path)
    _assert_equal(model, source)
    assert model[0].weight is model[2].weight
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    pstar.manage(model, device="cpu")
    _assert_equal(model, source)


def test_values_take_the_models_dtype_and_do_not_read_the_file_later(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    value = torch.randn(4, 4).bfloat16()
    save_file({"weight": value}, path)
    with torch.device("meta"):
        meta = nn.Linear(4, 4, bias=False)
    real = nn.Linear(4, 4, bias=False)
    half = nn.Linear(4, 4, bias=False, device="meta", dtype=torch.bfloat16)
    for model in (meta, real, half):
        pstar.load_safetensors(model, path)
    path.write_bytes(b"\0" * path.stat().st_size)
    for model in (meta, real, half):
        assert torch.equal(model.weight, value.to(model.weight.dtype))
    assert meta.weight.dtype is torch.float32
    assert half.weight.dtype is torch.bfloat16


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "1.weight": torch.ones(5), "x": torch.ones(1)}, path)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        pstar.load_safetensors(model, path)
    for part in (
        "'1.weight' has shape (5,) in the file and (4,) in the model",
        "'0.bias' is missing from the file",
        "'x' is not in the model",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="shape") as error:
        pstar.load_safetensors(model, path, strict=False)
    assert "missing" not in str(error.value)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value)


def test_without_strict_what_is_there_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"0.weight": torch.ones(2, 2), "x": torch.ones(1)}, path)
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(4))
    pstar.load_safetensors(model, path, strict=False)
    assert torch.equal(model[0].weight, torch.ones(2, 2))


def test_paths_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        pstar.load_safetensors(model, tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        pstar.load_safetensors(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors, which model"):
        pstar.load_safetensors(model, tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="not an index"):
        pstar.load_safetensors(model, tmp_path)
