"""A managed parameter: the master, its anchor, and where its module keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from pstar_compile import ops
from pstar_compile.runtime.arriving import Contribution
from pstar_compile.torch_compat import without_torch_function

if TYPE_CHECKING:
    from pstar_compile.runtime.engine import Engine


masters = WeakIdKeyDictionary()
"""Master -> a weak reference to its ``ManagedParameter``, by identity."""


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write parameters without moving their version counters."""
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        for master in group["params"]:
            reference = masters.get(master)
            parameter = None if reference is None else reference()
            if parameter is not None:
                parameter.optimizer_steps += 1


register_optimizer_step_post_hook(_note_step)


def written_in_forward(parameters: Iterable[ManagedParameter]) -> ValueError:
    """The error for parameters whose compute copies were written in place."""
    names = ", ".join(repr(p.name) for p in parameters)
    return ValueError(
        f"a forward writes to managed parameters in place: {names}. It reads copies, so the "
        f"writes would be lost. Write to parameters outside the forward, after optimizer.step() "
        f"say (nn.Embedding(max_norm=...) writes inside it: renormalise there instead), or call "
        f"pstar_compile.unmanage(model)."
    )


class ManagedParameter:
    """One master and everything the runtime knows of it.

    A tied parameter is one ``ManagedParameter`` with several places.
    """

    def __init__(
        self, name: str, master: nn.Parameter, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name
        self.master = master
        self.dtype = dtype
        self.shape = tuple(master.shape)
        self.nbytes = master.numel() * dtype.itemsize
        self.places: list[tuple[weakref.ref[nn.Module], str]] = []
        self.engine: Engine | None = None
        with torch.inference_mode(False):
            self.anchor = torch.zeros(1, dtype=dtype, device=device)
            self.zero = torch.zeros(1, dtype=dtype, device=device)
        self.anchor.requires_grad_(master.requires_grad)
        ops.bind(self.anchor, self)
        self.optimizer_steps = 0
        masters[master] = weakref.ref(self)
        if dtype.is_floating_point or dtype.is_complex:
            self._request_on_accumulate()

    def _request_on_accumulate(self) -> None:
        # Autograd accumulates into the anchor exactly when it would have accumulated into the
        # parameter (not for torch.autograd.grad, say), so this hook decides about p.grad.
        this = weakref.ref(self)

        def accumulated(anchor: Tensor) -> None:
            parameter = this()
            if parameter is not None and parameter.engine is not None:
                parameter.engine.gradients.request(parameter)

        requires_grad = self.anchor.requires_grad
        self.anchor.requires_grad_(True).register_post_accumulate_grad_hook(accumulated)
        self.anchor.requires_grad_(requires_grad)

    def place(self) -> Tensor:
        """The master's memory, also while a worker thread may be writing to it."""
        return without_torch_function(Tensor.detach, (self.master,), {})  # type: ignore[no-any-return]

    def fetch(self) -> Tensor:
        """The compute copy, fetched on demand (see ``ops``)."""
        return self._engine().on_demand.fetch(self)

    def reduce(self, grad: Tensor) -> None:
        """One gradient contribution outside a plan (see ``ops``)."""
        self._engine().gradients.add(self, Contribution(grad, None, owned=False))

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(
                f"parameter {self.name!r} was used after its model was unmanaged; "
                f"call pstar_compile.manage on the model that runs"
            )
        return self.engine

    def check_not_updated(self) -> None:
        """Raise if this backward has updated the parameter already, so that a gradient is late.

        Raises:
            RuntimeError: naming the parameter and what to do.
        """
        updates = self._engine().updates
        if updates is not None and self in updates.early:
            raise self.late_gradient()

    def late_gradient(self) -> RuntimeError:
        """The error for a gradient that comes when the parameter is updated already."""
        return RuntimeError(
            f"parameter {self.name!r} was updated inside the backward (update='backward'), and "
            f"gets another gradient from outside of the compiled model: a loss that reads the "
            f"parameter directly, say. Make the ChunkedOptimizer with update='step'."
        )

    def sync_requires_grad(self) -> bool:
        """Give the anchor the master's ``requires_grad``; returns whether it had another one."""
        if self.anchor.requires_grad == self.master.requires_grad:
            return False
        self.anchor.requires_grad_(self.master.requires_grad)
        for reference, attribute in self.places:
            module = reference()
            if module is not None:
                # Dynamo may take a module whose dicts nobody has written since its last look for
                # one whose tensors are as they were (seen on torch 2.11).
                anchors: dict[str, Any] = module.__dict__["_pstar_anchors"]
                anchors[attribute] = None
                anchors[attribute] = self.anchor
        return True

    def check_identity(self) -> None:
        """Raise if a module no longer holds the parameter that was managed.

        Raises:
            RuntimeError: naming the parameter and what to do.
        """
        for reference, attribute in self.places:
            module = reference()
            if module is not None and module._parameters.get(attribute) is not self.master:
                raise RuntimeError(
                    f"parameter {self.name!r} was replaced after pstar_compile.manage (attribute "
                    f"{attribute!r} of {type(module).__name__}), so the plan would train a tensor "
                    f"that the module no longer holds. Call pstar_compile.unmanage(model), make "
                    f"the change, and manage the model again."
                )
        if self.master.shape != self.shape:
            raise RuntimeError(
                f"parameter {self.name!r} changed its shape from {self.shape} to "
                f"{tuple(self.master.shape)} after pstar_compile.manage. Call "
                f"pstar_compile.unmanage(model), make the change, and manage the model again."
            )
