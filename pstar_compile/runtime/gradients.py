"""From gradient contributions on the device to ``p.grad`` at the master's home.

Contributions arrive while the backward runs. ``p.grad`` changes only once, when the backward is
complete: autograd says which parameters it wants accumulated (``request``), and a callback at the
end of the backward waits for the offloads and delivers. So a failed backward leaves ``p.grad``
untouched, and ``torch.autograd.grad`` does not change it either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pstar_compile.runtime.streams import Event
from pstar_compile.torch_compat import (
    apply_gradient_hooks,
    backward_id,
    call_after_backward,
    run_post_accumulate_hooks,
)

if TYPE_CHECKING:
    from pstar_compile.runtime.parameter import ManagedParameter


@dataclass(slots=True)
class _Contribution:
    grad: Tensor
    # The offload that fills ``grad``; None: it is there already.
    event: Event | None
    # Whether nobody else can hold ``grad``, so that it may become p.grad itself.
    owned: bool


@dataclass(slots=True)
class _Pending:
    contributions: dict[ManagedParameter, list[_Contribution]] = field(default_factory=dict)
    requested: dict[ManagedParameter, None] = field(default_factory=dict)


class Gradients:
    """Pending gradient contributions of one managed model, by backward.

    Args:
        delivered: called when a backward is over and its gradients are in place.
    """

    def __init__(self, delivered: Callable[[], None]) -> None:
        self._delivered = delivered
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}

    def add(
        self,
        parameter: ManagedParameter,
        grad: Tensor,
        *,
        event: Event | None = None,
        owned: bool = False,
    ) -> None:
        """Take one contribution to ``parameter``'s gradient, in the parameter's shape.

        ``grad`` may still be filled by an offload that ``event`` completes.
        """
        pending = self._of_running_backward()
        with self._lock:
            pending.contributions.setdefault(parameter, []).append(
                _Contribution(grad.detach(), event, owned)
            )

    def request(self, parameter: ManagedParameter) -> None:
        """Autograd accumulates into ``parameter``: deliver when the running backward is over."""
        parameter.anchor.grad = None
        pending = self._of_running_backward()
        with self._lock:
            pending.requested[parameter] = None

    def _of_running_backward(self) -> _Pending:
        """What the running backward has gathered; it is over with when the backward is, also if
        nothing was requested (``torch.autograd.grad``).
        """
        backward = backward_id()
        with self._lock:
            first = backward not in self._pending
            pending = self._pending.setdefault(backward, _Pending())
        if first:
            call_after_backward(lambda: self._deliver(backward))
        return pending

    def drop_abandoned(self) -> None:
        """Forget what a failed backward left behind. Call outside any backward."""
        if backward_id() == -1:
            with self._lock:
                self._pending.clear()

    def _deliver(self, backward: int) -> None:
        with self._lock:
            pending = self._pending.pop(backward)
        with torch.no_grad(), torch.inference_mode(False):
            for parameter in pending.requested:
                contributions = pending.contributions.get(parameter)
                if contributions:
                    _accumulate(parameter, contributions)
        self._delivered()


def _accumulate(parameter: ManagedParameter, contributions: Sequence[_Contribution]) -> None:
    for contribution in contributions:
        if contribution.event is not None:
            contribution.event.wait_host()
    master = parameter.master
    first = contributions[0]
    total, owned = first.grad, first.owned
    for other in contributions[1:]:
        total, owned = total + other.grad, True
    if total.dtype != master.dtype or total.device != master.device:
        total, owned = total.to(device=master.device, dtype=master.dtype), True
    hooked = apply_gradient_hooks(master, total)
    owned = owned and hooked is total
    total = hooked
    if master.grad is not None:
        master.grad.add_(total)
    else:
        # The same rule as autograd's own accumulation: a tensor that others can reach is copied.
        master.grad = total if owned and total.is_contiguous() else total.clone()
    run_post_accumulate_hooks(master)
