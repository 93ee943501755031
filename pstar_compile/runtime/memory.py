"""Host buffers of exact size, pinned where the device is a GPU, and leases on them."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import defaultdict

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def host_buffer(nbytes: int, *, pinned: bool) -> Tensor:
    """A uint8 host tensor of exactly ``nbytes`` bytes.

    Pinning touches the pages first and registers them afterwards: ``torch.empty(pin_memory=True)``
    rounds up to a power of two, and registering untouched pages is several times slower. If the
    system refuses to pin, the buffer stays pageable, copies become synchronous, and a warning
    says so.
    """
    with torch.inference_mode(False):
        buffer = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        buffer.zero_()
        address = buffer.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            log.warning(
                "could not pin %d bytes of host memory (%s); copies of these chunks will be slow. "
                "Raise the limit of locked memory (ulimit -l) or manage a smaller model.",
                nbytes,
                error,
            )
        else:
            weakref.finalize(buffer, _unpin, address).atexit = False
    return buffer


def _unpin(address: int) -> None:
    # A copy may still be running: the last tensor on a buffer can be dropped without reading it.
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


class HostPool:
    """Host buffers that come back by themselves when the last tensor on them is gone.

    A gradient given to the user as ``p.grad`` must stay valid for as long as anybody holds it, or
    a view of it; and the next backward should find its buffer again without pinning anew. So each
    lease is a tensor with a storage of its own, whose end returns the buffer.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.allocated_bytes = 0

    def lease(self, nbytes: int) -> Tensor:
        """A uint8 tensor of ``nbytes`` bytes with undefined contents."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._free[nbytes]:
            buffer = self._free[nbytes].pop()
        else:
            buffer = host_buffer(nbytes, pinned=self._pinned)
            self.allocated_bytes += nbytes
        owner = (ctypes.c_char * nbytes).from_address(buffer.data_ptr())
        weakref.finalize(owner, self._free[nbytes].append, buffer).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(owner, dtype=torch.uint8)
