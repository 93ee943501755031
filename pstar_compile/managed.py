"""``manage`` and ``unmanage``: modules whose parameters are fetched when a forward reads them.

``manage`` gives every module of a model a subclass in which parameter names are properties. Inside
a forward, reading ``self.weight`` yields ``pstar::fetch(anchor, shape)``; outside, the real
``nn.Parameter``, the master. ``_parameters`` still holds the masters, so ``state_dict``,
``parameters()`` and optimizers see what they expect.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pstar_compile.config import ManageConfig, parse_bytes
from pstar_compile.materialise import materialise
from pstar_compile.runtime.engine import Engine
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.runtime.stats import Stats
from pstar_compile.torch_compat import backward_id

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


class Scope:
    """Shared by all modules of one managed model: whether a forward is running, and the engine."""

    def __init__(self, engine: Engine, root: nn.Module) -> None:
        self.inside = False
        self.engine = engine
        self.root = weakref.ref(root)


class ManagedModule:
    """What the generated subclasses have in common; see :func:`_managed_class`."""

    _pstar_scope: Scope
    _pstar_anchors: dict[str, Tensor]
    _pstar_shapes: dict[str, tuple[int, ...]]
    _pstar_base: type[nn.Module]

    def get_parameter(self, target: str) -> Any:
        """As the attribute: a fetched tensor inside a forward, outside the master."""
        module: Any = self
        path, _, name = target.rpartition(".")
        holder = module.get_submodule(path)
        if isinstance(holder, ManagedModule) and name in holder._pstar_anchors:
            return getattr(holder, name)
        return nn.Module.get_parameter(module, target)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As the attributes, and so is what builds on it, ``parameters()``. In a backward these
        are the masters, however: a gradient hook that asks for them wants to see their gradients.
        """
        module: Any = self
        if not self._pstar_scope.inside:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
            return
        seen = set()
        holders = [(prefix, module)]
        if recurse:
            holders = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, holder in holders:
            anchors = holder._pstar_anchors if isinstance(holder, ManagedModule) else {}
            for name in holder._parameters:
                # Not the master itself: Dynamo would guard on where it is.
                identity = anchors[name] if name in anchors else holder._parameters[name]
                if identity is None or identity in seen:
                    continue
                if remove_duplicate:
                    seen.add(identity)
                yield f"{path}.{name}" if path else name, getattr(holder, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ManagedModule:
        """Apply a conversion such as ``.to()`` to the buffers; masters stay at their home."""
        module: Any = self
        scope = self._pstar_scope
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, master in module._parameters.items():
            if master is not None and fn(master.detach().new_empty(0)).dtype != master.dtype:
                raise ValueError(
                    f"the dtype of managed parameter {name!r} ({master.dtype}) cannot be "
                    f"converted in place: convert the model before pstar_compile.manage, or set "
                    f"param_dtype there for the compute copies"
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                converted = fn(buffer)
                if converted.device != scope.engine.config.device:
                    log.warning(
                        "buffers of a managed model stay on its compute device %s; the move to %s "
                        "is ignored",
                        scope.engine.config.device,
                        converted.device,
                    )
                    converted = buffer.to(converted.dtype)
                module._buffers[name] = converted
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module; the copy of a whole managed model is managed alike."""
        module: Any = self
        new = self._pstar_base.__new__(self._pstar_base)
        memo[id(self)] = new
        for key, value in module.__dict__.items():
            if not key.startswith("_pstar_"):
                new.__dict__[key] = copy.deepcopy(value, memo)
        scope = self._pstar_scope
        if scope.root() is module:
            _manage(new, scope.engine.config)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle."""
        raise TypeError(
            "a managed model cannot be pickled: save model.state_dict() instead, or call "
            "pstar_compile.unmanage(model) first"
        )


def _recomputing() -> bool:
    """Whether a backward runs on this thread: it may repeat a part of a forward (activation
    checkpointing), outside of any module's forward.
    """
    return not torch.compiler.is_compiling() and backward_id() != -1


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        if name in self._pstar_anchors and (self._pstar_scope.inside or _recomputing()):
            return torch.ops.pstar.fetch(self._pstar_anchors[name], self._pstar_shapes[name])
        try:
            return self._parameters[name]
        except KeyError:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            ) from None

    return property(read)


def _managed_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A new subclass of ``base`` whose parameters ``names`` are fetched inside a forward.

    Each managed model has classes of its own, shared by its equal blocks. Dynamo guards on classes,
    so code that was compiled for one model never serves another, which may have another device or
    budget. The ``forward`` of each class is a code object of its own, because Dynamo keeps by code
    object what it compiled, how often (``recompile_limit``), and that it must not try again.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self._pstar_scope
        if scope.inside:
            return base.forward(self, *args, **kwargs)
        scope.inside = True
        try:
            if torch.compiler.is_compiling():
                return base.forward(self, *args, **kwargs)
            scope.engine.begin_eager_forward()
            try:
                output = base.forward(self, *args, **kwargs)
                scope.engine.on_demand.check_unwritten()
                return output
            finally:
                scope.engine.end_eager_forward()
        finally:
            scope.inside = False

    namespace: dict[str, Any] = {name: _property(name) for name in names}
    own = FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    namespace["forward"] = functools.wraps(base.forward)(own)
    namespace["__module__"] = base.__module__
    namespace["__qualname__"] = base.__qualname__
    namespace["__doc__"] = base.__doc__
    if issubclass(base, nn.RNNBase):
        # RNNs keep their weights in a plain list as well; theirs must be fetched, too.
        namespace["_flat_weights"] = property(
            lambda self: [getattr(self, name, None) for name in self._flat_weights_names],
            lambda self, value: None,
        )
    return type(base.__name__, (ManagedModule, base), namespace)


def manage(
    model: Model,
    *,
    device: torch.device | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    arena_memory: int | str | None = None,
    param_dtype: torch.dtype | None = None,
) -> Model:
    """Let a plan decide where the parameters of ``model`` live and when they move.

    The model is changed in place and stays an ordinary module: ``parameters()``, ``state_dict()``
    and stock optimizers work on the masters, which stay where the plan keeps them. The model then
    computes on ``device``, compiled with ``backend="patrickstar"`` by a plan, or eagerly by
    fetching on demand.

    Args:
        model: a module. Parameters and buffers on the meta device are made here, module by module,
            with the values that each module's ``reset_parameters`` sets.
        device: the compute device, "cpu" or "cuda"; default: CUDA if there is any. Buffers move
            there at once.
        device_memory: bytes of that device that a step may use, as an int or "20GiB"; default:
            all there is. On CPU the device is emulated, and the default is without limit.
        host_memory: bytes of host memory that model states, compute copies and gradients may use;
            default: all there is but a reserve, where the device is a GPU, and else without limit.
        arena_memory: bytes that resident chunks may use within ``device_memory``; default: all
            that the plan can spare.
        param_dtype: floating-point dtype of the compute copies; default: each parameter's own.

    Returns:
        The same module.

    Raises:
        ValueError: for an unreadable size, an unknown or missing device, a model that is managed
            already, or parameters that cannot be managed; the message names them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"manage() takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "manage() takes the plain module: call manage(model) before torch.compile(model)"
        )
    if param_dtype is not None and not (
        isinstance(param_dtype, torch.dtype) and param_dtype.is_floating_point
    ):
        raise ValueError(
            f"param_dtype must be a floating-point dtype such as torch.bfloat16, "
            f"got {param_dtype!r}"
        )
    config = ManageConfig(
        device=_parse_device(device),
        device_memory=_parse_optional(device_memory, "device_memory"),
        host_memory=_parse_optional(host_memory, "host_memory"),
        arena_memory=_parse_optional(arena_memory, "arena_memory"),
        param_dtype=param_dtype,
    )
    _check_manageable(model)
    materialise(model, config.device)
    _manage(model, config)
    return model


def _parse_optional(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_bytes(size, name=name)


def _parse_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:<n>', got {device!r}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:<n>', got {str(parsed)!r}")
    if parsed.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {str(parsed)!r} was asked for, but torch {torch.__version__} sees no CUDA "
            f"device; use device='cpu' to emulate one"
        )
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda:{index}' does not exist: there are {torch.cuda.device_count()} devices"
        )
    return torch.device("cuda", index)


def _check_manageable(model: nn.Module) -> None:
    problems: list[str] = []
    ranges: list[tuple[str, int, int, str]] = []
    for name, module in model.named_modules():
        if isinstance(module, ManagedModule):
            raise ValueError(
                f"{'the model' if not name else f'submodule {name!r}'} is already managed; "
                f"call pstar_compile.unmanage first to change its settings"
            )
        if isinstance(module, torch.jit.ScriptModule):
            problems.append(f"{name or 'the model'} is a ScriptModule, which cannot be traced")
    for name, parameter in model.named_parameters():
        problem = _parameter_problem(parameter)
        if problem:
            problems.append(f"parameter {name!r} {problem}")
        elif parameter.numel() and not parameter.is_meta:
            start = parameter.data_ptr()
            ranges.append((str(parameter.device), start, start + parameter.nbytes, name))
    ranges.sort()
    for (device, _, end, name), (other, start, _, overlapping) in pairwise(ranges):
        if device == other and start < end:
            problems.append(
                f"parameters {name!r} and {overlapping!r} are different tensors on the same "
                f"memory; tie them by assigning one nn.Parameter to both modules"
            )
    if problems:
        raise ValueError(
            "this model cannot be managed:\n" + "\n".join(f"  - {p}" for p in problems)
        )


def _parameter_problem(parameter: nn.Parameter) -> str | None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "is not initialised yet; run the model once before managing it"
    if type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
        return f"is a {type(parameter.data).__name__} of layout {parameter.layout}, not a tensor"
    if any(st == 0 and n > 1 for st, n in zip(parameter.stride(), parameter.shape, strict=True)):
        return "repeats its memory (it was expanded); make it contiguous first"
    if parameter.is_inference():
        return "was created in inference mode; create the model outside of it"
    return None


def _manage(model: nn.Module, config: ManageConfig) -> None:
    managed: dict[nn.Parameter, ManagedParameter] = {}
    for name, master in model.named_parameters():
        dtype = master.dtype
        if config.param_dtype is not None and dtype.is_floating_point:
            dtype = config.param_dtype
        managed[master] = ManagedParameter(name, master, dtype, config.device)
    scope = Scope(Engine(config, tuple(managed.values())), model)
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for module in model.modules():
        names = tuple(module._parameters)
        present = {n: managed[p] for n, p in module._parameters.items() if p is not None}
        for attribute, parameter in present.items():
            parameter.places.append((weakref.ref(module), attribute))
        state = module.__dict__
        state["_pstar_scope"] = scope
        state["_pstar_anchors"] = {n: p.anchor for n, p in present.items()}
        state["_pstar_shapes"] = {n: p.shape for n, p in present.items()}
        state["_pstar_base"] = type(module)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(config.device)
        state.pop("_flat_weights", None)
        kind = type(module), names
        if kind not in classes:
            classes[kind] = _managed_class(*kind)
        module.__class__ = classes[kind]
    log.info("managing %s on %s", scope.engine.describe(), config.device)


def unmanage(model: Model) -> Model:
    """Undo :func:`manage`: the plain module, with the parameters' present values.

    Masters keep their device and ``nn.Parameter`` identity, so optimizers go on working; compiled
    versions of the model must be compiled again.

    Raises:
        ValueError: if the model is not managed.
    """
    model = uncompiled(model)
    engine = engine_of(model)
    for module in model.modules():
        if isinstance(module, ManagedModule):
            module.__class__ = module._pstar_base  # type: ignore[assignment]
            for key in [k for k in module.__dict__ if k.startswith("_pstar_")]:
                del module.__dict__[key]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
    engine.close()
    return model


def uncompiled(model: Model) -> Model:
    """The module behind what ``torch.compile`` returned, or the module itself."""
    plain: Model = getattr(model, "_orig_mod", model)
    return plain


def engine_of(model: nn.Module) -> Engine:
    """The engine of a managed model (or of a compiled version of one).

    Raises:
        ValueError: if the model is not managed.
    """
    module = uncompiled(model)
    if not isinstance(module, ManagedModule):
        raise ValueError(
            f"this {type(module).__name__} is not managed; call pstar_compile.manage(model) first"
        )
    return module._pstar_scope.engine


def stats(model: nn.Module) -> Stats:
    """What the last step of a managed model did: a forward and its backward, or one inference call.

    Raises:
        ValueError: if the model is not managed.
    """
    return engine_of(model).stats()
