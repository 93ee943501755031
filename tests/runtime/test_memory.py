"""Leases on host buffers."""

from __future__ import annotations

import gc

from pstar_compile.runtime.memory import HostPool, host_buffer


def test_a_buffer_has_exactly_the_bytes() -> None:
    assert host_buffer(5 * 2**20 + 3, pinned=False).nbytes == 5 * 2**20 + 3


def test_a_lease_returns_when_its_last_view_dies() -> None:
    pool = HostPool(pinned=False)
    lease = pool.lease(1024)
    address = lease.data_ptr()
    view = lease[256:512].view(8, 32)
    del lease
    gc.collect()
    other = pool.lease(1024)
    assert other.data_ptr() != address and pool.allocated_bytes == 2048
    view.fill_(7)
    assert int(view.sum()) == 7 * 256
    del view
    gc.collect()
    assert pool.lease(1024).data_ptr() == address
    assert pool.allocated_bytes == 2048


def test_an_empty_lease_takes_nothing() -> None:
    pool = HostPool(pinned=False)
    assert pool.lease(0).nbytes == 0 and pool.allocated_bytes == 0
