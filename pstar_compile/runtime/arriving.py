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
from pstar_compile.runtime.watched import change_class
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
        norm: its 2-norm, on the compute device; None: nobody has computed it.
    """

    grad: Tensor
    event: Event | None
    owned: bool
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor of gradients, on the compute device and on the host.

    Attributes:
        device: the factor where it was computed.
        host: the same on the host.
        event: the copy that fills ``host``.
    """

    device: Tensor
    host: Tensor
    event: Event

    def on(self, device: torch.device) -> Tensor:
        """The factor on one of the two; never makes the host wait for the compute stream."""
        if device == self.device.device:
            return self.device
        self.event.wait_host()
        return self.host


def _sum(grad: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients; PyTorch adds a sparse one to a dense one, not the other way."""
    return other + grad if grad.is_sparse and not other.is_sparse else grad + other


def norm_of(grad: Tensor) -> Tensor:
    """The 2-norm of a gradient, summed in fp32 at least."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=wide)
    return norm


@dataclass(slots=True)
class OnItsWay:
    """A gradient that is not in ``p.grad`` yet.

    Attributes:
        contributions: what it is the sum of.
        scale: what the sum is multiplied with (gradient clipping); None: nothing.
    """

    contributions: Sequence[Contribution]
    scale: Scale | None = None

    def scale_by(self, scale: Scale) -> None:
        """Multiply the gradient by a factor, when it is made."""
        if self.scale is None:
            self.scale = scale
        else:
            # Two factors become one, where both are known: clipped twice, say.
            device = self.scale.device * scale.device
            self.scale.event.wait_host()
            scale.event.wait_host()
            self.scale = Scale(device, self.scale.host * scale.host, scale.event)

    def total(
        self, master: Tensor, into: Tensor | None = None, span: slice | None = None
    ) -> tuple[Tensor, bool]:
        """The gradient in the master's dtype and on its device, and whether nobody else holds it.

        Blocks until the copies are complete. Where something has to be computed, ``into`` takes
        the result. ``span`` is a range of elements that is asked for alone, as a vector.
        """
        first, *others = (
            c.grad if span is None else c.grad.to_dense().reshape(-1)[span]
            for c in self.contributions
        )
        total, owned = first, self.contributions[0].owned
        for contribution in self.contributions:
            if contribution.event is not None:
                contribution.event.wait_host()
        for other in others:
            total, owned = _sum(total, other), True
        if total.dtype != master.dtype or total.device != master.device or self.scale is not None:
            if into is None or total.is_sparse:
                into = torch.empty_like(total, device=master.device, dtype=master.dtype)
            total, owned = into.copy_(total), True
        if self.scale is not None:
            total.mul_(self.scale.on(total.device))
        return total, owned


_arriving = WeakIdKeyDictionary()
"""Master -> its gradient that is not in ``p.grad`` yet."""

_lock = threading.RLock()
"""Held while one arrives: another thread that reads the gradient waits for it, too."""

_grad: Any = Tensor.grad
"""The attribute itself, whatever the master's class."""


@without_dynamo
def deliver(master: nn.Parameter, contributions: Sequence[Contribution]) -> None:
    """Accumulate into ``master.grad``: now, or when it is read.

    Later only if nobody can tell: there are copies or casts to make, no hook wants the gradient,
    and no tensor that somebody may hold has to change.
    """
    unseen = master in _arriving
    _arrive(master)
    making = any(c.event is not None or c.grad.dtype != master.dtype for c in contributions)
    if making and not has_gradient_hooks(master) and (unseen or master.grad is None):
        _arriving[master] = OnItsWay(contributions)
        if not isinstance(master, _Arriving):
            change_class(master, _arriving_class)
    else:
        _accumulate(master, OnItsWay(contributions), hooks=True)


def gradient_of(master: nn.Parameter) -> OnItsWay | Tensor | None:
    """The gradient without waiting for it: on its way, or ``p.grad``."""
    with _lock:
        if _grad.__get__(master) is not None:
            _arrive(master)
        found: OnItsWay | None = _arriving.get(master)
    return _grad.__get__(master) if found is None else found


def settle(master: nn.Parameter) -> None:
    """Wait for what is on its way to ``master.grad``, and give the master its own class again."""
    if isinstance(master, _Arriving):
        _arrive(master)
        base = master._pstar_base
        change_class(master, lambda _: base)


class _Arriving:
    """Marks the generated subclasses."""

    _pstar_base: type[nn.Parameter]


# Dynamo must not look into these when an optimizer is compiled that reads ``grad``.
@without_dynamo
def _arrive(master: nn.Parameter) -> None:
    with _lock:
        on_its_way = _arriving.get(master)
        if on_its_way is not None:
            # Whoever wanted to be told had no hook when the gradient was due.
            _accumulate(master, on_its_way, hooks=False)
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


def _accumulate(master: nn.Parameter, on_its_way: OnItsWay, *, hooks: bool) -> None:
    with torch.no_grad(), torch.inference_mode(False):
        total, owned = on_its_way.total(master)
        if hooks:
            hooked = apply_gradient_hooks(master, total)
            owned = owned and hooked is total
            total = hooked
        present = _grad.__get__(master)
        if present is not None and present.is_sparse and not total.is_sparse:
            _grad.__set__(master, _sum(present, total))
        elif present is not None:
            present.add_(total)
        else:
            # The rule of autograd's own accumulation: a tensor that others can reach is copied.
            keep = owned and total.is_contiguous()
            _grad.__set__(master, total if keep else total.clone())
        if hooks:
            run_post_accumulate_hooks(master)
