"""Fetches that no plan foresaw: eager mode, graph breaks, disabled functions.

Each fetched parameter gets device memory of its own, so a tensor that the user keeps stays valid
after the parameter is evicted. The least recently used ones are evicted to hold the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pstar_compile.runtime.parameter import written_in_forward
from pstar_compile.torch_compat import backward_id, storage_is_alive, weak_storage, without_dynamo

if TYPE_CHECKING:
    from pstar_compile.runtime.parameter import ManagedParameter
    from pstar_compile.runtime.stats import Counters


class _Packed:
    """A saved view of a fetched parameter: everything but its bytes."""

    def __init__(self, parameter: ManagedParameter, view: Tensor) -> None:
        self.parameter = parameter
        self.version = parameter.master._version
        self.geometry = (view.size(), view.stride(), view.storage_offset())
        self.dtype = view.dtype


@dataclass(frozen=True, slots=True)
class _Resident:
    """A compute copy; the master's version counter, and its own, when it was filled."""

    copy: Tensor
    master_version: int
    version: int

    @property
    def written(self) -> bool:
        """Whether somebody wrote to the copy: the master would never see it."""
        return self.copy._version != self.version


class OnDemand:
    """The compute copies that were fetched on demand, within a byte limit.

    Args:
        device: where compute copies go.
        limit: tells how many bytes they may occupy when one of the given bytes is needed; None:
            there is no limit, and a master that is on the device in the right dtype serves as its
            own compute copy.
        counters: where fetches are counted.
    """

    def __init__(
        self,
        device: torch.device,
        limit: Callable[[ManagedParameter], int | None],
        counters: Counters,
    ) -> None:
        self._device = device
        self._limit = limit
        self._counters = counters
        self._resident: OrderedDict[ManagedParameter, _Resident] = OrderedDict()
        self._by_pointer: dict[int, ManagedParameter] = {}
        # Evicted copies that somebody may still hold: they occupy memory until then.
        self._evicted: list[tuple[object, int]] = []
        self._depth = 0
        self._saving: AbstractContextManager[object] = nullcontext()

    def fetch(self, parameter: ManagedParameter) -> Tensor:
        """The compute copy of ``parameter``: its values as they are now, on the device."""
        parameter.check_identity()
        master = parameter.master
        limit = self._limit(parameter)
        if limit is None and master.device == self._device and master.dtype == parameter.dtype:
            return master.detach()
        resident = self._resident.get(parameter)
        if resident is not None and resident.master_version == master._version:
            self._resident.move_to_end(parameter)
            return resident.copy.detach()
        self._evict([parameter])
        if limit is not None:
            self._make_room(parameter, limit)
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            copy.copy_(master.detach(), non_blocking=True)
        self._resident[parameter] = _Resident(copy, master._version, copy._version)
        self._by_pointer[copy.untyped_storage().data_ptr()] = parameter
        self._counters.on_demand(parameter.nbytes)
        return copy.detach()

    def drop_all(self) -> None:
        """Evict everything: masters may have been written since.

        Raises:
            ValueError: if a copy was written; it names the parameters.
        """
        self._evict(list(self._resident))

    def close(self) -> None:
        """Forget everything, written or not."""
        for parameter in list(self._resident):
            self._drop(parameter)

    @without_dynamo
    def check_unwritten(self) -> None:
        """Raise now what evicting the copies would raise later.

        Raises:
            ValueError: if a copy was written; it names the parameters.
        """
        self._evict([p for p, resident in self._resident.items() if resident.written])

    @property
    def resident_bytes(self) -> int:
        """Bytes of all copies, evicted ones that are still held included."""
        self._evicted = [e for e in self._evicted if storage_is_alive(e[0])]
        return sum(p.nbytes for p in self._resident) + sum(n for _, n in self._evicted)

    def _make_room(self, parameter: ManagedParameter, limit: int) -> None:
        if parameter.nbytes > limit:
            raise ValueError(
                f"parameter {parameter.name!r} needs {parameter.nbytes} bytes on the device, but "
                f"only {limit} bytes are allowed for compute copies; raise device_memory (or "
                f"arena_memory) in pstar_compile.manage"
            )
        while self._resident and self.resident_bytes + parameter.nbytes > limit:
            self._evict([next(iter(self._resident))])

    def _evict(self, parameters: Sequence[ManagedParameter]) -> None:
        written = [p for p in parameters if self._drop(p)]
        if written:
            raise written_in_forward(written)

    def _drop(self, parameter: ManagedParameter) -> bool:
        """Forget a copy; returns whether it was written."""
        resident = self._resident.pop(parameter, None)
        if resident is None:
            return False
        self._by_pointer.pop(resident.copy.untyped_storage().data_ptr(), None)
        self._evicted.append((weak_storage(resident.copy), parameter.nbytes))
        return resident.written

    @property
    def in_forward(self) -> bool:
        """Whether an eager forward is running."""
        return self._depth > 0

    def begin_forward(self) -> None:
        """An eager forward begins: fetches see the masters as they are now, and what autograd
        saves of a fetched parameter is replaced by a recipe to fetch it again in the backward.
        """
        if self._depth == 0 and backward_id() != -1:
            # Activation checkpointing repeats a forward: it keeps account of what is saved itself.
            self._saving = nullcontext()
        elif self._depth == 0:
            self.drop_all()
            self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        if self._depth == 0:
            self._saving.__enter__()
        self._depth += 1

    def end_forward(self) -> None:
        """The forward that began last ends."""
        self._depth -= 1
        if self._depth == 0:
            self._saving.__exit__(None, None, None)

    @without_dynamo
    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        if type(tensor) is not Tensor or not self._by_pointer:
            return tensor
        parameter = self._by_pointer.get(tensor.untyped_storage().data_ptr())
        return tensor if parameter is None else _Packed(parameter, tensor)

    @without_dynamo
    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.parameter.master._version != packed.version:
            raise RuntimeError(
                f"parameter {packed.parameter.name!r}, needed for the gradient computation, was "
                f"modified in place between forward and backward; call backward() before the "
                f"optimizer's step"
            )
        whole = packed.parameter.fetch()
        if packed.dtype != whole.dtype:
            whole = whole.view(packed.dtype)
        return whole.as_strided(*packed.geometry)
