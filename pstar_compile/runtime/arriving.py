"""Gradients on their way to ``p.grad``: ``backward()`` does not wait for the last copies.

A master whose gradient is still being copied gets a subclass of its own class in which reading
``grad`` first waits for the copy. Whoever reads ``p.grad`` sees what PyTorch would have put there;
whoever does not read it waits for nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pstar_compile.runtime.streams import Event
from pstar_compile.torch_compat import (
    apply_gradient_hooks,
    has_gradient_hooks,
    run_post_accumulate_hooks,
    without_dynamo,
)


@dataclass(slots=True)
class Contribution:
    """One contribution to a gradient, in the parameter's shape.

    Attributes:
        grad: its values.
        event: the copy that fills ``grad``; None: it is there already.
        owned: whether nobody else can hold ``grad``, so that it may become ``p.grad`` itself.
    """

    grad: Tensor
    event: Event | None
    owned: bool


_arriving = WeakIdKeyDictionary()
"""Master -> contributions that are not in ``p.grad`` yet."""

_lock = threading.RLock()
"""Held while one arrives: another thread that reads the gradient waits for it, too."""

_grad: Any = Tensor.grad
"""The attribute itself, whatever the master's class."""


@without_dynamo
def deliver(master: nn.Parameter, contributions: Sequence[Contribution]) -> None:
    """Accumulate into ``master.grad``: now, or when it is read.

    Later only if nobody can tell: there are copies to wait for, no hook wants the gradient, and
    no tensor that somebody may hold has to change.
    """
    unseen = master in _arriving
    _arrive(master)
    copying = any(c.event is not None for c in contributions)
    if copying and not has_gradient_hooks(master) and (unseen or master.grad is None):
        _arriving[master] = contributions
        if not isinstance(master, _Arriving):
            master.__class__ = _arriving_class(type(master))
    else:
        _accumulate(master, contributions, hooks=True)


def settle(master: nn.Parameter) -> None:
    """Wait for what is on its way to ``master.grad``, and give the master its own class again."""
    if isinstance(master, _Arriving):
        _arrive(master)
        master.__class__ = master._pstar_base  # type: ignore[assignment]


class _Arriving:
    """Marks the generated subclasses."""

    _pstar_base: type[nn.Parameter]


# Dynamo must not look into these when an optimizer is compiled that reads ``grad``.
@without_dynamo
def _arrive(master: nn.Parameter) -> None:
    with _lock:
        contributions = _arriving.get(master)
        if contributions is not None:
            # Whoever wanted to be told had no hook when the gradient was due.
            _accumulate(master, contributions, hooks=False)
            del _arriving[master]


@without_dynamo
def _forget(master: nn.Parameter) -> None:
    _arriving.pop(master, None)


@functools.cache
def _arriving_class(base: type[nn.Parameter]) -> type[nn.Parameter]:
    def read(self: nn.Parameter) -> Tensor | None:
        _arrive(self)
        grad: Tensor | None = _grad.__get__(self)
        return grad

    def write(self: nn.Parameter, grad: Tensor | None) -> None:
        _grad.__set__(self, grad)
        _forget(self)

    def delete(self: nn.Parameter) -> None:
        write(self, None)

    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied: nn.Parameter = base.__deepcopy__(self, memo)
        copied.__class__ = base
        return copied

    namespace: dict[str, Any] = {
        "grad": property(read, write, delete),
        "__deepcopy__": deepcopy,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_pstar_base": base,
    }
    return type(base.__name__, (_Arriving, base), namespace)


def _accumulate(
    master: nn.Parameter, contributions: Sequence[Contribution], *, hooks: bool
) -> None:
    with torch.no_grad(), torch.inference_mode(False):
        for contribution in contributions:
            if contribution.event is not None:
                contribution.event.wait_host()
        first = contributions[0]
        total, owned = first.grad, first.owned
        for other in contributions[1:]:
            total, owned = total + other.grad, True
        if total.dtype != master.dtype or total.device != master.device:
            total, owned = total.to(device=master.device, dtype=master.dtype), True
        if hooks:
            hooked = apply_gradient_hooks(master, total)
            owned = owned and hooked is total
            total = hooked
        present = _grad.__get__(master)
        if present is not None:
            present.add_(total)
        else:
            # The rule of autograd's own accumulation: a tensor that others can reach is copied.
            keep = owned and total.is_contiguous()
            _grad.__set__(master, total if keep else total.clone())
        if hooks:
            run_post_accumulate_hooks(master)
