"""User-facing settings: byte sizes, the settings of ``manage``, and the backend's options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

Inner = Literal["inductor", "eager"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | float | str, *, name: str) -> int:
    """Turn ``20 * 2**30`` or ``"20GiB"`` into a number of bytes.

    Args:
        size: a positive number of bytes, or a string with a unit: B, KB, MB, GB, TB (powers of
            1000), KiB, MiB, GiB, TiB (powers of 1024).
        name: what the size is for; used in the error.

    Raises:
        ValueError: if the size cannot be read or is not positive.
    """
    nbytes: float | None = None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match and match[2].upper() in _UNITS:
            nbytes = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(size, int | float) and not isinstance(size, bool):
        nbytes = float(size)
    if nbytes is None or not 1 <= nbytes < float("inf"):
        raise ValueError(
            f"{name} must be a positive number of bytes or a size such as '20GiB' or '512MB', "
            f"got {size!r}"
        )
    return int(nbytes)


def format_bytes(nbytes: float) -> str:
    """A byte count for people: ``format_bytes(3 * 2**20)`` is ``"3.0 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class ManageConfig:
    """What ``manage`` was asked for."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The compute device: where segments run and the arena lives."""
    device_memory: int | None = None
    """Bytes of device memory the step may use, non-model data included; None: all there is."""
    host_memory: int | None = None
    """Bytes of host memory that model states, compute copies and gradients may use; None: all there
    is."""
    arena_memory: int | None = None
    """Bytes the chunk arena may use within ``device_memory``; None: what the plan can spare."""
    param_dtype: torch.dtype | None = None
    """Floating-point dtype of the compute copies; None: each parameter's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """The knobs in ``torch.compile(..., backend="patrickstar", options={...})``."""

    inner: Inner = "inductor"
    """What compiles the segments: "inductor", or "eager" to run them op by op (debugging)."""
    prefetch: int | None = None
    """How many moments ahead of its use a chunk may be fetched; 0: never ahead; None: the plan
    fetches as early as there is room."""
    chunk_bytes: int | str | None = None
    """Overrides the chunk size that the plan would choose: bytes or a size such as "64MiB"."""
    trust_version_counters: bool = False
    """Reuse compute copies left on the device or the host by an earlier step when autograd's
    version counters say that their masters were not written since. Off by default because
    in-place writes through ``p.data`` do not move those counters."""

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> BackendConfig:
        """Check the ``options`` given to ``torch.compile``.

        Raises:
            ValueError: for an unknown option (with the closest known one and the list of all), or
                a value that an option does not take.
        """
        known = [f.name for f in fields(BackendConfig)]
        for key in options or {}:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"unknown option {key!r} for backend 'patrickstar'{hint} "
                    f"(known options: {', '.join(known)})"
                )
        config = BackendConfig(**(options or {}))
        if config.inner not in get_args(Inner):
            raise ValueError(
                f"option 'inner' must be one of {', '.join(get_args(Inner))}, got {config.inner!r}"
            )
        prefetch = config.prefetch
        if prefetch is not None and (
            not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0
        ):
            raise ValueError(
                f"option 'prefetch' must be a whole number of moments >= 0, or None, "
                f"got {prefetch!r}"
            )
        if config.chunk_bytes is not None:
            parse_bytes(config.chunk_bytes, name="option 'chunk_bytes'")
        if not isinstance(config.trust_version_counters, bool):
            raise ValueError(
                f"option 'trust_version_counters' must be True or False, "
                f"got {config.trust_version_counters!r}"
            )
        return config

    @property
    def chunk_target(self) -> int | None:
        """``chunk_bytes`` in bytes."""
        if self.chunk_bytes is None:
            return None
        return parse_bytes(self.chunk_bytes, name="option 'chunk_bytes'")
