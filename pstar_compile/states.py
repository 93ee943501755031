"""How many bytes the model states of a managed model take, for the passes."""

from __future__ import annotations

from collections.abc import Sequence

from passes.placement import States
from pstar_compile.runtime.engine import Engine
from pstar_compile.runtime.parameter import ManagedParameter

_UNKNOWN_MOMENTS = 2
"""Moments of the master's size that an optimizer is taken to have when the plan knows of none."""


def states_of(engine: Engine, parameters: Sequence[ManagedParameter]) -> States:
    """The states behind the parameters of one plan, and those of the whole model.

    Args:
        engine: the model's engine.
        parameters: those of the plan, by index.
    """
    inside = set(parameters)
    stored = [engine.chunk_of.get(p) for p in parameters]
    everything = [_beside(engine, p) + _room(engine, p) for p in engine.parameters]
    resident = [p.nbytes * (2 if _trained(p) else 1) for p in engine.parameters]
    return States(
        nbytes=tuple(_beside(engine, p) for p in parameters),
        room=tuple(_room(engine, p) for p in parameters),
        cast=tuple(_is_cast(p) for p in parameters),
        masters=tuple(p.master.nbytes for p in parameters),
        homes=tuple(None if chunk is None else chunk.layout.home for chunk in stored),
        model_bytes=sum(everything) + sum(resident),
        resident_bytes=sum(resident),
        others_bytes=sum(
            p.master.nbytes * (2 if _trained(p) else 1)
            for p in engine.parameters
            if p not in inside
        ),
    )


def _trained(parameter: ManagedParameter) -> bool:
    return parameter.master.requires_grad


def _is_cast(parameter: ManagedParameter) -> bool:
    return parameter.dtype != parameter.master.dtype


def _beside(engine: Engine, parameter: ManagedParameter) -> int:
    """Bytes beside the compute copy: the master, if that is not it, and what optimizers keep."""
    master = parameter.master.nbytes if _is_cast(parameter) else 0
    return master + (engine.updates.state_bytes(parameter) if engine.updates is not None else 0)


def _room(engine: Engine, parameter: ManagedParameter) -> int:
    """Bytes for moments, and a gradient in the master's dtype, of an optimizer not known here."""
    if engine.updates is not None or not _trained(parameter):
        return 0
    master = parameter.master.nbytes
    return _UNKNOWN_MOMENTS * master + (master - parameter.nbytes if _is_cast(parameter) else 0)
