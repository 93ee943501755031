"""Chunks as memory: where the masters of each chunk live and what a fetch copies from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from passes.plan import Chunk, Home
from pstar_compile.runtime.memory import host_buffer
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.runtime.watched import is_watched
from pstar_compile.runtime.worker import Job


class StoredChunk:
    """One chunk of real parameters.

    With home ``host`` there is one contiguous host buffer that a fetch copies in one piece. If
    the masters have the chunk's dtype, or are to be cast on the device, they live in that buffer;
    otherwise the buffer holds compute copies that are cast from the masters before they are
    fetched.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        layout: Chunk,
        *,
        device: torch.device,
        pinned: bool,
    ) -> None:
        self.parameters = tuple(parameters)
        self.layout = layout
        self.buffer: Tensor | None = None
        self._device = device
        self._pinned = pinned
        self._views: list[Tensor] = []
        # Masters that live in the buffer, and compute copies in it.
        self._inside: list[tuple[Tensor, ManagedParameter]] = []
        self._casts: list[tuple[Tensor, ManagedParameter]] = []
        self._written: tuple[tuple[int, int, int], ...] | None = None
        self._fetched: tuple[tuple[int, int, int], ...] | None = None
        # The latest update of the masters, while nobody else may have written them since.
        self.updating: Job | None = None
        self._settle()

    def is_at(self, layout: Chunk) -> bool:
        """Whether the states are where a plan's layout has them."""
        offsets = [[s.offset for s in each.masters] for each in (self.layout, layout)]
        same = self.layout.home is layout.home and self.layout.wide is layout.wide
        return same and offsets[0] == offsets[1]

    def move(self, layout: Chunk) -> None:
        """Move the masters to where another layout of the same content has them. Nothing may be
        copying from or to the chunk.
        """
        self.layout = replace(
            self.layout, home=layout.home, masters=layout.masters, wide=layout.wide
        )
        self._written = self._fetched = None
        self._settle()

    def _settle(self) -> None:
        """Bring the masters to their home."""
        layout, views = self.layout, self._views
        self.buffer, self._views, self._inside, self._casts = None, [], [], []
        if layout.home is Home.DEVICE:
            for parameter in self.parameters:
                _move(parameter, _apart(parameter.master, views, self._device))
            return
        self.buffer = host_buffer(layout.fetch_bytes, pinned=self._pinned)
        self._views = self.staged(self.buffer) if layout.masters else self.views(self.buffer)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.master.dtype == view.dtype:
                view.copy_(parameter.master.detach())
                _move(parameter, view)
                self._inside.append((view, parameter))
            else:
                self._casts.append((view, parameter))
                _move(parameter, _apart(parameter.master, views, torch.device("cpu")))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters' tensors inside a buffer with this chunk's layout, in content order."""
        return [
            buffer[slot.offset : slot.offset + slot.nbytes]
            .view(self.layout.dtype)
            .view(parameter.shape)
            for slot, parameter in zip(self.layout.content, self.parameters, strict=True)
        ]

    def staged(self, buffer: Tensor) -> list[Tensor]:
        """The masters inside a buffer with the layout in which they are fetched to be cast."""
        return [
            buffer[slot.offset : slot.offset + slot.nbytes]
            .view(parameter.master.dtype)
            .view(parameter.shape)
            for slot, parameter in zip(self.layout.masters, self.parameters, strict=True)
        ]

    def written(self) -> tuple[tuple[int, int, int], ...]:
        """A mark that changes when autograd's version counters, or an optimizer's step, say that
        a master was written.
        """
        return tuple(
            (p.master._version, p.place().data_ptr(), p.optimizer_steps) for p in self.parameters
        )

    def preparation(self, *, trust: bool) -> Callable[[], None] | None:
        """What must run before the host buffer may be fetched; None: it is current.

        ``trust`` takes the version counters' word for casts that were already made. While nobody
        has touched the masters since an update, the update left the buffer current.

        Raises:
            Exception: whatever the chunk's update raised.
        """
        if self.updating is not None:
            if all(is_watched(p.master) for p in self.parameters):
                if not self.updating.reached():
                    return self.updating.wait_host
                self.updating.wait_host()
                return None
            self.updating = None
        stale = [
            (view, parameter)
            for view, parameter in self._inside
            if view.nbytes and parameter.place().data_ptr() != view.data_ptr()
        ]
        if self._casts:
            written = self.written()
            if not (trust and written == self._written):
                self._written = written
                stale += self._casts
        if not stale:
            return None

        def prepare() -> None:
            for view, parameter in stale:
                view.copy_(parameter.master.detach())

        return prepare

    @property
    def copies(self) -> dict[ManagedParameter, Tensor]:
        """The compute copies in the host buffer, of masters in another dtype."""
        return {parameter: view for view, parameter in self._casts}

    def fetched(self) -> None:
        """A fetch copies the masters as they are now."""
        self._fetched = self.written()

    def unchanged(self) -> bool:
        """Whether, by the version counters, no master was written since the last fetch."""
        return self._fetched == self.written()

    def release_masters(self) -> None:
        """Give every master a storage of its own again."""
        for parameter in self.parameters:
            _move(parameter, parameter.master.detach().clone())


def _apart(master: Tensor, views: Sequence[Tensor], device: torch.device) -> Tensor:
    """The master on ``device``, outside the buffer that ``views`` share."""
    data = master.detach()
    moved = data.to(device)
    inside = any(moved.data_ptr() == view.data_ptr() for view in views)
    return moved.clone() if inside else moved


def _move(parameter: ManagedParameter, data: Tensor) -> None:
    """Let the master live in ``data``, keeping the nn.Parameter object and its gradient."""
    master = parameter.master
    with torch.no_grad(), torch.inference_mode(False):
        grad, master.grad = master.grad, None
        master.data = data
        if grad is not None:
            master.grad = grad.to(data.device)
