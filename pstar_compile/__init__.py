"""The ``patrickstar`` backend of ``torch.compile``: train models that do not fit on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from passes.plan import PlanError
    from pstar_compile.managed import manage, stats, unmanage
    from pstar_compile.optim import ChunkedOptimizer
    from pstar_compile.report.plan import Plan, last_plan
    from pstar_compile.weights import load_safetensors

__version__ = "0.1.0"

__all__ = [
    "ChunkedOptimizer",
    "Plan",
    "PlanError",
    "last_plan",
    "load_safetensors",
    "manage",
    "stats",
    "unmanage",
]

_HOME = {
    "ChunkedOptimizer": "pstar_compile.optim",
    "Plan": "pstar_compile.report.plan",
    "PlanError": "passes.plan",
    "last_plan": "pstar_compile.report.plan",
    "load_safetensors": "pstar_compile.weights",
    "manage": "pstar_compile.managed",
    "stats": "pstar_compile.managed",
    "unmanage": "pstar_compile.managed",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: TORCH_LOGS imports this package while torch loads."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names."""
    return [*__all__, "__version__"]
