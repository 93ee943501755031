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
    the masters have the chunk's dtype, they live in that buffer; otherwise the buffer holds
    compute copies that are cast from the masters before they are fetched.
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
        self._casts: list[tuple[Tensor, ManagedParameter]] = []
        self._written: tuple[tuple[int, int, int], ...] | None = None
        self._fetched: tuple[tuple[int, int, int], ...] | None = None
        # The latest update of the masters, while nobody else may have written them since.
        self.updating: Job | None = None
        self._settle()

    def move(self, home: Home) -> None:
        """Move the masters to another home. Nothing may be copying from or to the chunk."""
        self.layout = replace(self.layout, home=home)
        self._written = self._fetched = None
        self._settle()

    def _settle(self) -> None:
        """Bring the masters to their home."""
        layout = self.layout
        if layout.home is Home.DEVICE:
            for parameter in self.parameters:
                _move(parameter, _apart(parameter.master, self._views, self._device))
            self.buffer, self._views, self._casts = None, [], []
            return
        self.buffer = host_buffer(layout.nbytes, pinned=self._pinned)
        self._views = self.views(self.buffer)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.master.dtype == layout.dtype:
                view.copy_(parameter.master.detach())
                _move(parameter, view)
            else:
                self._casts.append((view, parameter))
                _move(parameter, parameter.master.detach().to("cpu"))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters' tensors inside a buffer with this chunk's layout, in content order."""
        return [
            buffer[slot.offset : slot.offset + slot.nbytes]
            .view(self.layout.dtype)
            .view(parameter.shape)
            for slot, parameter in zip(self.layout.content, self.parameters, strict=True)
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
            for slot, view, parameter in zip(
                self.layout.content, self._views, self.parameters, strict=True
            )
            if slot.nbytes
            and parameter.master.dtype == self.layout.dtype
            and parameter.place().data_ptr() != view.data_ptr()
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
