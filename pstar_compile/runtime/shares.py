"""Shares: the part of a param group that lies in one chunk, updated by stock optimizers.

Where the host casts, an elementwise class updates a chunk in pieces: a piece's gradient is cast,
its parameters are updated, and its compute copy is cast again while all of it is in the CPU's
caches. Cast, update and cast of a whole chunk would each read it from memory anew. The states that
users see are whole tensors all the same: a piece's are views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.plan import align
from pstar_compile.runtime.arriving import OnItsWay
from pstar_compile.runtime.parameter import ManagedParameter

MakeOptimizer = Callable[[list[nn.Parameter], dict[str, Any]], torch.optim.Optimizer]
"""From parameters and the settings of their group to a stock optimizer."""

PIECE = 2**21
"""Elements that are updated at once: long enough that Python's part of an optimizer step is small,
short enough for the caches of a server CPU (a gradient, a master and two moments in fp32: 32 MiB).
A power of two, so that the vectorised loops of a piece end where those of the whole would not."""


@dataclass(slots=True, eq=False)
class _Part:
    """What one optimizer updates of one parameter: all of it, or a range of its elements.

    Attributes:
        position: the parameter's position in the share.
        span: the range; None: all.
        leaf: what the optimizer updates, on the master's memory; no user ever sees it.
        whole: state name -> the whole tensor that the optimizer's is a view of.
        views: state name -> that view.
    """

    position: int
    span: slice | None
    leaf: nn.Parameter
    whole: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Piece:
    """Parts that are updated in one step of one optimizer."""

    optimizer: torch.optim.Optimizer
    parts: list[_Part]


class Share:
    """The part of a param group that lies in one chunk.

    Args:
        parameters: its parameters.
        make: makes the stock optimizers.
        values: the settings of the group.
        on_host: whether the masters live on the host.
        in_pieces: whether to update them in pieces.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        make: MakeOptimizer,
        values: dict[str, Any],
        *,
        on_host: bool,
        in_pieces: bool,
    ) -> None:
        self.parameters = tuple(parameters)
        self.on_host = on_host
        self._pieces: list[_Piece] = []
        for spans in _cut(self.parameters, PIECE if in_pieces else None):
            parts = [
                _Part(i, span, nn.Parameter(_part(parameters[i].place(), span), _trains(p)))
                for i, span in spans
                for p in (parameters[i],)
            ]
            self._pieces.append(_Piece(make([part.leaf for part in parts], values), parts))

    def run(
        self,
        values: Mapping[str, Any],
        gradients: Sequence[OnItsWay | Tensor | None],
        state: dict[Any, Any],
        *,
        scratch: Scratch | None,
        copies: Mapping[ManagedParameter, Tensor],
    ) -> None:
        """Update the parameters that have a gradient, on the current thread and stream.

        Args:
            values: the settings of the group.
            gradients: one for each parameter.
            state: master -> its states, which users see.
            scratch: memory for gradients that have to be cast; None: allocated.
            copies: compute copies that are to follow their masters.
        """
        # States that this update has made: other pieces have not made their part of them yet.
        made: set[tuple[int, str]] = set()
        # The first range of a parameter comes last: what its optimizer counts is what users see.
        for piece in reversed(self._pieces):
            if scratch is not None:
                scratch.reset()
            due = [part for part in piece.parts if gradients[part.position] is not None]
            if not due:
                continue
            for part in due:
                parameter = self.parameters[part.position]
                _follow(part, parameter)
                gradient = gradients[part.position]
                if isinstance(gradient, OnItsWay):
                    room = None if scratch is None else scratch.take(part.leaf)
                    gradient = gradient.total(part.leaf, into=room, span=part.span)[0]
                elif gradient is not None and part.span is not None:
                    gradient = gradient.reshape(-1)[part.span]
                part.leaf.grad = gradient
                _attach(part, piece.optimizer, state.get(parameter.master), values, made)
            piece.optimizer.param_groups[0].update(values)
            piece.optimizer.step()
            for part in due:
                parameter = self.parameters[part.position]
                part.leaf.grad = None
                _publish(part, piece.optimizer, state, parameter, made)
                copy = copies.get(parameter)
                if copy is not None:
                    _part(copy, part.span).copy_(part.leaf.detach())

    def bring(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """Bring the states to where the masters are now."""
        (group,) = self._pieces[0].optimizer.param_groups
        for parameter in self.parameters:
            bring(state.get(parameter.master, {}), parameter.master.device, group)


class Scratch:
    """Host memory that holds the cast gradients of one piece, and is used again for the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._end = 0

    def reset(self) -> None:
        """Nobody needs what was taken."""
        self._end = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the same shape and dtype."""
        start, end = self._end, self._end + like.nbytes
        if self._memory.nbytes < end:
            # Earlier gradients of this piece keep the memory that they are in.
            self._memory = torch.empty(2 * end, dtype=torch.uint8)
        self._end = align(end)
        return self._memory[start:end].view(like.dtype).view(like.shape)


def bring(state: dict[str, Any], device: torch.device, group: Mapping[str, Any]) -> None:
    """Move a parameter's optimizer states to its device, in place."""
    # Stock optimizers keep the count of steps on the host, unless their kernels read it.
    with_step = bool(group.get("fused") or group.get("capturable"))
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device != device and (name != "step" or with_step):
            state[name] = value.to(device)


def _trains(parameter: ManagedParameter) -> bool:
    return parameter.master.requires_grad


def _cut(
    parameters: Sequence[ManagedParameter], size: int | None
) -> list[list[tuple[int, slice | None]]]:
    """Positions and ranges of parameters, by piece. ``size`` is in elements; None: one piece."""
    if size is None:
        return [[(i, None) for i in range(len(parameters))]]
    pieces: list[list[tuple[int, slice | None]]] = []
    together: list[tuple[int, slice | None]] = []
    taken = 0
    for position, parameter in enumerate(parameters):
        place = parameter.place()
        if place.numel() > size and place.is_contiguous():
            starts = range(0, place.numel(), size)
            pieces += [[(position, slice(a, min(a + size, place.numel())))] for a in starts]
            continue
        if together and taken + place.numel() > size:
            pieces.append(together)
            together, taken = [], 0
        together.append((position, None))
        taken += place.numel()
    return [*pieces, together] if together else pieces


def _part(tensor: Tensor, span: slice | None) -> Tensor:
    return tensor if span is None else tensor.view(-1)[span]


def _follow(part: _Part, parameter: ManagedParameter) -> None:
    """Let the leaf lie on the master's memory again, if that has another place by now."""
    place = _part(parameter.place(), part.span)
    if part.leaf.data_ptr() != place.data_ptr() or part.leaf.device != place.device:
        part.leaf.data = place


def _attach(
    part: _Part,
    optimizer: torch.optim.Optimizer,
    found: dict[str, Any] | None,
    values: Mapping[str, Any],
    made: set[tuple[int, str]],
) -> None:
    """Give the optimizer the states that users see, and may have loaded or changed."""
    leaf = part.leaf
    if found is None:
        # Somebody cleared them. What the class makes in its constructor is not theirs to clear.
        if part.views:
            optimizer.state.pop(leaf, None)
            part.whole.clear()
            part.views.clear()
        return
    bring(found, leaf.device, values)
    if part.span is None:
        optimizer.state[leaf] = found
        return
    own = optimizer.state[leaf]
    for name, value in found.items():
        if (part.position, name) in made:
            continue
        if not isinstance(value, Tensor):
            own[name] = value
        elif value.numel() > 1:
            if part.whole.get(name) is not value:
                part.whole[name] = value = found[name] = value.contiguous()
                part.views[name] = own[name] = value.view(-1)[part.span]
        elif part.span.start == 0:
            own[name] = value
        elif name in own and own[name] is not None:
            own[name].copy_(value)
        else:
            own[name] = value.clone()
    for name in own.keys() - found.keys():
        if (part.position, name) not in made:
            del own[name]


def _publish(
    part: _Part,
    optimizer: torch.optim.Optimizer,
    state: dict[Any, Any],
    parameter: ManagedParameter,
    made: set[tuple[int, str]],
) -> None:
    """Show users the states that the optimizer has made."""
    own = optimizer.state.get(part.leaf)
    if own is None:
        return
    if part.span is None:
        state[parameter.master] = own
        return
    found = state.setdefault(parameter.master, {})
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape == part.leaf.shape:
            if part.views.get(name) is value:
                continue
            if (part.position, name) not in made:
                made.add((part.position, name))
                place = parameter.place()
                found[name] = torch.empty(place.shape, dtype=value.dtype, device=value.device)
            part.whole[name] = found[name]
            part.views[name] = own[name] = found[name].view(-1)[part.span].copy_(value)
        elif part.span.start == 0:
            found[name] = value
        elif name not in found:
            made.add((part.position, name))
    if part.span.start == 0 and list(found) != list(own):
        # In the class's order, as if one optimizer had made them.
        ordered = {name: found[name] for name in own}
        found.clear()
        found.update(ordered)
