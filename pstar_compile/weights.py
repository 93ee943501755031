"""Weights from safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pstar_compile.managed import uncompiled
from pstar_compile.materialise import give_memory


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> None:
    """Load weights in Hugging Face's layout into a model, never holding more than one tensor more.

    The model may be managed: values go to the masters, wherever they are. Or it may be a plain one
    on the meta device, to be managed afterwards: each tensor gets its memory on the host as its
    value is read. Values are converted to the dtype that the model has.

    Args:
        model: a module, managed or not, compiled or not.
        path: a ``.safetensors`` file, the ``.safetensors.index.json`` of a sharded one, or the
            directory that has ``model.safetensors`` or its index.
        strict: whether each of the model's tensors must be in the file, and the other way round.
            One name of a tied parameter suffices.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming tensors that are missing, unknown or of another shape; nothing is
            loaded then.
        ImportError: if the package safetensors is not installed.
    """
    files = _files(Path(path))
    module = uncompiled(model)
    targets = _targets(module)
    shapes = dict(_shapes(files))
    _check(targets, shapes, strict=strict)
    for name, value in _values(files):
        if name in targets:
            _set(module, name, targets[name], value)


def _files(path: Path) -> list[Path]:
    """The files that hold the tensors."""
    if path.is_dir():
        whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
        if not whole.exists() and not index.exists():
            raise FileNotFoundError(
                f"{path} holds neither model.safetensors nor model.safetensors.index.json"
            )
        path = whole if whole.exists() else index
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != ".json":
        return [path]
    try:
        names: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error!r}") from error
    files = [path.parent / name for name in dict.fromkeys(names.values())]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file}, which {path.name} names, does not exist")
    return files


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model by their names in ``state_dict``."""
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _shapes(files: list[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in files:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (no mapping)
                yield name, tuple(reader.get_slice(name).get_shape())


def _values(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (no mapping)
                yield name, reader.get_tensor(name)


def _open(file: Path):  # type: ignore[no-untyped-def]
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "load_safetensors needs the package safetensors: "
            "pip install 'pstar-compile[safetensors]'"
        ) from error
    return safe_open(file, framework="pt", device="cpu")


def _check(
    targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, strict: bool
) -> None:
    problems = [
        f"{name!r} has shape {shapes[name]} in the file and {tuple(target.shape)} in the model"
        for name, target in targets.items()
        if name in shapes and shapes[name] != tuple(target.shape)
    ]
    if strict:
        names = defaultdict(list)
        for name, target in targets.items():
            names[id(target)].append(name)
        problems += [
            f"{' or '.join(map(repr, each))} is missing from the file"
            for each in names.values()
            if not any(name in shapes for name in each)
        ]
        problems += [f"{name!r} is not in the model" for name in shapes if name not in targets]
    if problems:
        shown = [f"  - {p}" for p in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            shown.append(f"  - and {len(problems) - _SHOWN} more")
        raise ValueError("these weights do not fit the model:\n" + "\n".join(shown))


_SHOWN = 20
"""Problems that a refusal lists."""


def _set(module: nn.Module, name: str, target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if not target.is_meta:
            target.copy_(value)
        elif isinstance(target, nn.Parameter):
            give_memory(target, _own_memory(value, target.dtype))
        else:
            path, _, key = name.rpartition(".")
            module.get_submodule(path)._buffers[key] = _own_memory(value, target.dtype)


def _own_memory(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value outside of the mapped file."""
    return value.to(dtype, copy=True).contiguous()
