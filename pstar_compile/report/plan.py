"""The plan as users see it."""

from __future__ import annotations

from torch import nn

from passes.plan import Chunk, Moment, Schedule, StepPlan
from pstar_compile.backend import engine_of_parameter
from pstar_compile.managed import ManagedModule, engine_of
from pstar_compile.program import Planned
from pstar_compile.report.readable import readable
from pstar_compile.report.tables import chunk_table, schedule_table, totals_table


class Plan:
    """A step plan: ``print(plan)`` for tables, ``plan.print_readable()`` for the graphs.

    Attributes:
        step: the plan as the passes made it.
        chunks: parameters that move together, with home and layout.
        moments: the step's segments in order.
        schedule: all memory nodes in issue order, with offsets and dependencies.
        arena_bytes: device bytes preallocated for resident chunks.
        peak_device_bytes: predicted peak of device memory.
        h2d_bytes, d2h_bytes: predicted traffic of a step.
        carried_bytes: the part of ``h2d_bytes`` that is skipped after an unchanged step.
        step_seconds: predicted time of forward and backward.
    """

    def __init__(self, planned: Planned) -> None:
        self.step: StepPlan = planned.step
        self._graphs = planned.graphs

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Parameters that move together."""
        return self.step.chunks

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The step's segments in order."""
        return self.step.moments

    @property
    def schedule(self) -> Schedule:
        """All memory nodes in issue order."""
        return self.step.schedule

    @property
    def arena_bytes(self) -> int:
        """Device bytes preallocated for resident chunks."""
        return self.step.schedule.arena_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Predicted peak of device memory, in bytes."""
        return self.step.peak_device_bytes

    @property
    def h2d_bytes(self) -> int:
        """Bytes a step copies from the host to the device."""
        return self.step.h2d_bytes

    @property
    def d2h_bytes(self) -> int:
        """Bytes a step copies from the device to the host."""
        return self.step.d2h_bytes

    @property
    def carried_bytes(self) -> int:
        """The part of :attr:`h2d_bytes` that is skipped after an unchanged step."""
        return self.step.carried_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.step.step_seconds

    def print_readable(self, *, print_output: bool = True) -> str:
        """The annotated forward and backward graphs.

        Args:
            print_output: also print them.

        Returns:
            The text.
        """
        text = "\n".join(
            readable(graph, self.step, direction) for direction, graph in self._graphs.items()
        )
        if print_output:
            print(text)
        return text

    def __str__(self) -> str:
        """The plan's tables."""
        return "\n\n".join(
            (totals_table(self.step), chunk_table(self.step), schedule_table(self.step))
        )

    def __repr__(self) -> str:
        """One line."""
        return (
            f"<Plan: {len(self.chunks)} chunks, {len(self.moments)} moments, "
            f"{len(self.schedule.actions)} actions>"
        )


def last_plan(model: nn.Module) -> Plan:
    """The plan that a compiled model ran last (of training or inference).

    Args:
        model: what ``torch.compile`` returned, or the module itself.

    Raises:
        ValueError: if the model has not run a plan yet.
    """
    module = getattr(model, "_orig_mod", model)
    engine = None
    if isinstance(module, ManagedModule):
        engine = engine_of(model)
    else:
        for parameter in module.parameters():
            engine = engine_of_parameter.get(parameter, engine)
    planned = None if engine is None else engine.last_plan
    if not isinstance(planned, Planned):
        raise ValueError(
            "this model has run no plan yet: compile it with "
            "torch.compile(model, backend='patrickstar') and call it once"
        )
    return Plan(planned)
