"""From gradient contributions on the device to ``p.grad`` at the master's home.

Contributions come in while the backward runs. ``p.grad`` changes only once, when the backward is
complete: autograd says which parameters it wants accumulated (``request``), and a callback at the
end of the backward delivers (see ``arriving``). So a failed backward leaves ``p.grad`` untouched,
and ``torch.autograd.grad`` does not change it either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pstar_compile.runtime.arriving import Contribution, deliver
from pstar_compile.torch_compat import backward_id, call_after_backward

if TYPE_CHECKING:
    from pstar_compile.runtime.parameter import ManagedParameter


@dataclass(slots=True)
class _Pending:
    contributions: dict[ManagedParameter, list[Contribution]] = field(default_factory=dict)
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

    def add(self, parameter: ManagedParameter, contribution: Contribution) -> None:
        """Take one contribution to ``parameter``'s gradient."""
        contribution.grad = contribution.grad.detach()
        pending = self._of_running_backward()
        with self._lock:
            pending.contributions.setdefault(parameter, []).append(contribution)

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
        for parameter in pending.requested:
            contributions = pending.contributions.get(parameter)
            if contributions:
                parameter.check_not_updated()
                deliver(parameter.master, contributions)
        self._delivered()
