"""Rates of devices, for predicting the time of segments and copies.

Peak matmul rates and memory bandwidths are the vendors' data-sheet figures (dense) scaled by the
fraction that training steps and copies reach; link rates are those of pinned copies while both
directions are busy.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from passes.plan import Rates

_MATMUL_FRACTION = 0.64
"""Measured on an H200 in whole steps of GPTs of 7 and 10 B parameters, at the clock that its power
limit leaves: a lone matmul reaches 0.75."""
_MEMORY_FRACTION = 0.9


_HOST_RESERVE = 0.05
"""Part of the host's memory that is left to Python, to CUDA's own data and to everyone else."""

_UPDATE_BYTES = 34
"""Bytes of memory traffic of an Adam update for each element: master and two moments read and
written, a gradient read, cast and read again."""


def _gpu(bf16: float, tf32_off: float, memory: float, link: float) -> Rates:
    half = bf16 * 1e12 * _MATMUL_FRACTION
    single = tf32_off * 1e12 * _MATMUL_FRACTION
    return Rates(
        flops={
            torch.bfloat16: half,
            torch.float16: half,
            torch.float32: single,
            torch.float64: single / 2,
        },
        memory=memory * 1e9 * _MEMORY_FRACTION,
        h2d=link * 1e9,
        d2h=link * 1e9,
        update_device=memory * 1e9 * _MEMORY_FRACTION / _UPDATE_BYTES,
        update_host=_update_host(os.cpu_count() or 1),
        # Measured with 16 threads, from fp32 to bf16.
        cast_host=13.2e9 * min(1.0, (os.cpu_count() or 1) / 16),
    )


def _update_host(cores: int) -> float:
    """Elements that a fused CPU optimizer updates a second beside copies, on all but two cores."""
    # Measured with 14 threads while copies ran both ways; memory bounds it above that.
    return 3.2e9 * min(1.0, max(cores - 2, 1) / 14)


# name fragment -> dense bf16 TFLOP/s, fp32 TFLOP/s, memory GB/s, pinned copy GB/s each way
_CATALOGUE = {
    "H200": _gpu(989, 67, 4800, 50),
    "H100": _gpu(989, 67, 3350, 50),
    "A100": _gpu(312, 19.5, 2039, 22),
    "V100": _gpu(125, 15.7, 900, 11),
    "4090": _gpu(165, 82.6, 1008, 22),
}
_OTHER_GPU = _gpu(100, 15, 800, 11)

_CPU = Rates(
    flops={
        torch.float32: 60e9,
        torch.float64: 30e9,
        torch.bfloat16: 30e9,
        torch.float16: 30e9,
    },
    memory=15e9,
    h2d=6e9,
    d2h=6e9,
    update_device=0.4e9,
    update_host=0.4e9,
    cast_host=4e9,
)


def rates_of(device: torch.device) -> Rates:
    """Rates of a device: the catalogue's for its name, or cautious ones for an unknown GPU."""
    if device.type != "cuda":
        return _CPU
    return named_rates(torch.cuda.get_device_name(device))


def named_rates(name: str) -> Rates:
    """The catalogue's rates for a GPU's name, or cautious ones for an unknown GPU."""
    for fragment, rates in _CATALOGUE.items():
        if fragment in name:
            return rates
    return _OTHER_GPU


def host_memory_bytes() -> int | None:
    """Bytes of host memory that model states may use: what the machine, or the container (Linux
    control groups, version 2), has but a reserve of 5 %. None: the system does not say.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists():
        text = limit.read_text().strip()
        total = min(total, int(text)) if text.isdigit() else total
    return int(total * (1 - _HOST_RESERVE))


def library_bytes(device: torch.device) -> int:
    """Device memory that libraries take beside the graphs' data, in bytes: cuBLAS workspaces."""
    if device.type != "cuda":
        return 0
    hopper_or_newer = torch.cuda.get_device_capability(device)[0] >= 9
    return (32 if hopper_or_newer else 8) * 1024**2
