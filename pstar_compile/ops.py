"""The custom ops that a managed parameter leaves in a graph.

``pstar::fetch(anchor, shape)`` stands for reading a parameter, ``pstar::reduce(grad, anchor)`` for
giving it a gradient. The *anchor*, a one-element tensor on the compute device, names the parameter
by its data pointer, so no id is ever baked into a graph. ``number`` tells the reduces of one traced
graph apart: equal contributions of two uses are two. ``pstar::unwritten(copy, anchor)`` stands in
graphs only while they are traced, see :mod:`pstar_compile.writes`. The ops are defined with
``torch.library.Library`` rather than ``custom_op``: several times cheaper per call, and no version
counter is bumped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pstar_compile.torch_compat import without_dynamo


class Owner(Protocol):
    """What stands behind an anchor: a managed parameter."""

    def fetch(self) -> Tensor:
        """Return the compute copy on the compute device, in the parameter's shape."""

    def reduce(self, grad: Tensor) -> None:
        """Take one gradient contribution."""


_owners: WeakValueDictionary[int, Owner] = WeakValueDictionary()

_library = torch.library.Library("pstar", "DEF")
_library.define("fetch(Tensor anchor, SymInt[] shape) -> Tensor")
_library.define("reduce(Tensor grad, Tensor anchor, int number=0) -> Tensor")
_library.define("unwritten(Tensor copy, Tensor anchor) -> ()")


def bind(anchor: Tensor, owner: Owner) -> None:
    """Let ``anchor`` name ``owner`` for as long as the owner (which holds the anchor) lives."""
    _owners[anchor.data_ptr()] = owner


def owner_of(anchor: object) -> Owner | None:
    """The managed parameter behind a tensor, or None if the tensor is no anchor."""
    if not isinstance(anchor, Tensor) or anchor.numel() != 1 or anchor.device.type == "meta":
        return None
    return _owners.get(anchor.data_ptr())


def _require_owner(anchor: Tensor) -> Owner:
    owner = _owners.get(anchor.data_ptr())
    if owner is None:
        raise RuntimeError(
            "a managed parameter was used after its model was unmanaged or freed; "
            "call pstar_compile.manage on the model that runs"
        )
    return owner


# Dynamo must not look into the runtime when it meets these in code that it does not compile.
@without_dynamo
def _fetch(anchor: Tensor, shape: Sequence[int]) -> Tensor:
    return _require_owner(anchor).fetch()


@without_dynamo
def _reduce(grad: Tensor, anchor: Tensor, number: int = 0) -> Tensor:
    _require_owner(anchor).reduce(grad)
    return torch.zeros_like(anchor)


_library.impl("fetch", _fetch, "CompositeExplicitAutograd")
_library.impl("reduce", _reduce, "CompositeExplicitAutograd")


def _fake_fetch(anchor: Tensor, shape: Sequence[int]) -> Tensor:
    return anchor.new_empty(shape)


def _fake_reduce(grad: Tensor, anchor: Tensor, number: int = 0) -> Tensor:
    return torch.empty_like(anchor)


torch.library.register_fake("pstar::fetch", _fake_fetch, lib=_library)
torch.library.register_fake("pstar::reduce", _fake_reduce, lib=_library)
torch.library.register_fake("pstar::unwritten", lambda copy, anchor: None, lib=_library)


def _save_anchor(ctx: Any, inputs: tuple[Tensor, Sequence[int]], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _fetch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (anchor,) = ctx.saved_tensors
    return torch.ops.pstar.reduce(grad, anchor), None


def _refuse_double_backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
    raise RuntimeError(
        "the gradient of a managed parameter cannot be differentiated again: "
        "double backward (create_graph=True) needs the plain model, see pstar_compile.unmanage"
    )


torch.library.register_autograd(
    "pstar::fetch", _fetch_backward, setup_context=_save_anchor, lib=_library
)
torch.library.register_autograd("pstar::reduce", _refuse_double_backward, lib=_library)

FETCH = torch.ops.pstar.fetch.default
REDUCE = torch.ops.pstar.reduce.default
UNWRITTEN = torch.ops.pstar.unwritten.default

# What has a result that nobody reads, or none, must survive dead-code elimination.
torch.fx.node.has_side_effect(REDUCE)
torch.fx.node.has_side_effect(UNWRITTEN)
