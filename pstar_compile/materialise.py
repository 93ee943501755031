"""Models built on the meta device get their memory module by module, never the whole model twice.

``torch.device("meta")`` builds a model without memory and without its initialisation. Here each
module's own tensors are made on the compute device, where random numbers are fast, initialised by
the module's ``reset_parameters``, and brought to the host, before the next module's turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the meta parameters and buffers of ``model`` memory and their modules' own values.

    Modules come in the order in which constructors run, children first, so that with the same seed
    a model whose modules initialise themselves gets the values that it would have had without
    ``torch.device("meta")`` on ``device``. Tensors that have memory already keep their values, and
    a tied parameter gets those of its first owner.

    Args:
        model: changed in place; each ``nn.Parameter`` stays the object that it is.
        device: where values are computed. Parameters end on the host, buffers on ``device``.

    Raises:
        ValueError: naming the modules that cannot initialise themselves, before anything is made,
            or the tensors that their ``reset_parameters`` leaves without a value.
    """
    modules = [_Module.of(name, module) for name, module in _children_first(model, "", set())]
    missing = sum(t.is_meta for _, t in _tensors(model))
    if not missing:
        return
    _check_resettable(modules)
    for each in modules:
        _make_own(each.name, each.module, device)
        if each.resets_children:
            _reset(each.module)
    log.info("initialised %d tensors of a model on the meta device", missing)


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the model before anything is made.

    Attributes:
        resets_children: it has tensors on the meta device in its children alone; such a module may
            set their values again, as ``nn.Transformer`` does.
    """

    name: str
    module: nn.Module
    resets_children: bool

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Module:
        tensors = [t for _, t in _tensors(module)]
        whole = bool(tensors) and all(t.is_meta for t in tensors)
        return cls(name, module, whole and not _own(module))


def give_memory(parameter: nn.Parameter, data: Tensor) -> None:
    """Let a meta parameter be ``data``, which has its shape; the object stays the same."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, new)


def _make_own(name: str, module: nn.Module, device: torch.device) -> None:
    """Make and initialise the tensors of one module without its children."""
    own = _own(module)
    missing = {key: t for key, t in own.items() if t.is_meta}
    if not missing:
        return
    kept = [(t, t.detach().clone()) for t in own.values() if not t.is_meta]
    if isinstance(module, nn.RNNBase):
        # Weak references keep tensors from being swapped; the list is made anew below.
        module._flat_weight_refs = []
    for key, tensor in missing.items():
        data = torch.empty_like(tensor.detach(), device=device)
        # No module begins with NaN: what is NaN afterwards was left out.
        data.fill_(float("nan") if data.is_floating_point() else 0)
        if isinstance(tensor, nn.Parameter):
            give_memory(tensor, data)
        else:
            module._buffers[key] = data
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    _reset(module)
    made = {key: t for key, t in _own(module).items() if key in missing}
    unset = [key for key, t in made.items() if t.is_floating_point() and t.isnan().any()]
    if unset:
        raise ValueError(
            f"reset_parameters of {_title(name, module)} leaves {', '.join(map(repr, unset))} "
            f"without a value, so a model built on the meta device cannot be initialised; set "
            f"every parameter and buffer of the module there"
        )
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
        for tensor in made.values():
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.cpu()


def _reset(module: nn.Module) -> None:
    reset = _reset_of(module)
    if reset is not None:
        with torch.no_grad():
            reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The module's own initialisation; ``nn.MultiheadAttention`` and others name it privately."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], object] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _check_resettable(modules: Sequence[_Module]) -> None:
    problems = []
    for each in modules:
        missing = [key for key, t in _own(each.module).items() if t.is_meta]
        if missing and _reset_of(each.module) is None:
            problems.append(f"{_title(each.name, each.module)} ({', '.join(missing)})")
    if problems:
        raise ValueError(
            "this model is on the meta device, and these modules cannot initialise themselves, "
            "because they have no reset_parameters():\n"
            + "\n".join(f"  - {p}" for p in problems)
            + "\nGive their classes one that sets the named parameters and buffers, or give the "
            "model its values before manage (pstar_compile.load_safetensors, or model.to_empty "
            "and an initialisation of your own)."
        )


def _title(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {name!r}" if name else f"the model ({type(module).__name__})"


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module without its children."""
    held = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in held.items() if tensor is not None}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _children_first(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        if child not in seen:
            seen.add(child)
            yield from _children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module
