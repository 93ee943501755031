"""Masters that a worker thread may be writing: whoever looks at one waits for it first.

``ChunkedOptimizer.step()`` returns before all updates are done. Until then, and until somebody
touches it, a master has a subclass of its own class in which every operation of PyTorch first waits
for the update. So user code sees the values that PyTorch would have put there, and the runtime
knows that nobody else wrote them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pstar_compile.torch_compat import without_torch_function

_pending = WeakIdKeyDictionary()
"""Master -> what waits for its update."""

_METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad"),
                *("grad_fn", "_version", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
                *("is_quantized", "itemsize", "nbytes", "_backward_hooks"),
                *("_post_accumulate_grad_hooks",),
            )
        ),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(
            getattr(Tensor, name)
            for name in (
                *("size", "dim", "numel", "nelement", "stride", "element_size", "ndimension"),
                *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "__len__"),
                *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
                *("__hash__", "get_device", "storage_offset", "is_pinned"),
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What tells nothing of a tensor's values, and changes none."""

_READ_GRAD = cast(Any, Tensor).grad.__get__


class _Watched:
    """Marks the generated subclasses."""

    _pstar_unwatched: type[nn.Parameter]


def watch(master: nn.Parameter, wait: Callable[[], None]) -> None:
    """Let ``wait`` run before anybody looks at ``master``."""
    _pending[master] = wait
    if not isinstance(master, _Watched):
        master.__class__ = _watched_class(type(master))


def is_watched(master: nn.Parameter) -> bool:
    """Whether nobody has looked at the master since its last update was given."""
    return isinstance(master, _Watched)


def change_class(
    master: nn.Parameter, change: Callable[[type[nn.Parameter]], type[nn.Parameter]]
) -> None:
    """Change the class that the master has when it is not watched; it stays watched if it is."""
    if isinstance(master, _Watched):
        watched: Any = _watched_class(change(master._pstar_unwatched))
        master.__class__ = watched
    else:
        master.__class__ = change(type(master))


def touch(masters: Iterable[nn.Parameter]) -> None:
    """Wait for the masters' updates, and give them their own class again."""
    for master in masters:
        if isinstance(master, _Watched):
            master.__class__ = master._pstar_unwatched  # type: ignore[assignment]
            _pending.pop(master)()


@functools.cache
def _watched_class(base: type[nn.Parameter]) -> type[nn.Parameter]:
    def intercept(
        cls: type[nn.Parameter],
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function == _READ_GRAD and without_torch_function(function, args, {}) is None:
            # Else the update may be reading what the caller is going to write.
            return None
        if function in _METADATA:
            return without_torch_function(function, args, kwargs or {})
        touch(_masters_in((args, kwargs or {})))
        return function(*args, **(kwargs or {}))

    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        touch([self])
        copied: nn.Parameter = self.__deepcopy__(memo)
        return copied

    def reduce(self: nn.Parameter, protocol: Any) -> Any:
        touch([self])
        return self.__reduce_ex__(protocol)

    namespace: dict[str, Any] = {
        "__torch_function__": classmethod(intercept),
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_pstar_unwatched": base,
    }
    return type(base.__name__, (_Watched, base), namespace)


def _masters_in(value: Any) -> list[nn.Parameter]:
    if isinstance(value, _Watched):
        return [cast(nn.Parameter, value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return [master for each in value for master in _masters_in(each)]
    return []
