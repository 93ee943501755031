"""The plan as users see it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from passes.plan import Chunk, Moment, Schedule, StepPlan
from pstar_compile.backend import engine_of_parameter
from pstar_compile.managed import ManagedModule, engine_of, uncompiled
from pstar_compile.program import Planned
from pstar_compile.report.readable import readable
from pstar_compile.report.tables import chunk_table, schedule_table, totals_table


class Plan:
    """What a step runs: ``print(plan)`` for tables, ``plan.print_readable()`` for the graphs.

    A step of several graphs (after graph breaks, or of blocks compiled one by one) has a plan for
    each; see ``parts``. Figures are then those of the whole step. Once the step's backward is over,
    a graph whose backward did not run in it (the first forward of a checkpointed block, or one that
    the loss does not depend on) is shown with its forward alone.
    """

    def __init__(self, parts: Sequence[Planned]) -> None:
        self._planned = tuple(parts)

    @property
    def parts(self) -> tuple[Plan, ...]:
        """One plan for each graph of the step, in the order of their forwards."""
        return tuple(Plan([planned]) for planned in self._planned)

    @property
    def step(self) -> StepPlan:
        """The plan as the passes made it.

        Raises:
            ValueError: if the step has several graphs.
        """
        if len(self._planned) != 1:
            raise ValueError(
                f"this step has {len(self._planned)} graphs, each with a plan of its own: "
                f"see plan.parts"
            )
        return self._planned[0].step

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Parameters that move together, with home and layout."""
        return tuple(chunk for planned in self._planned for chunk in planned.step.chunks)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The step's segments in order."""
        return tuple(moment for planned in self._planned for moment in planned.step.moments)

    @property
    def schedule(self) -> Schedule:
        """All memory nodes in issue order, with offsets and dependencies; raises as ``step``."""
        return self.step.schedule

    @property
    def arena_bytes(self) -> int:
        """Device bytes preallocated for resident chunks."""
        return max(planned.step.schedule.arena_bytes for planned in self._planned)

    @property
    def peak_device_bytes(self) -> int:
        """Predicted peak of device memory, in bytes."""
        return max(planned.step.peak_device_bytes for planned in self._planned)

    @property
    def peak_host_bytes(self) -> int:
        """Predicted bytes of host memory: model states at home there, compute copies, gradients."""
        return max(planned.step.peak_host_bytes for planned in self._planned)

    @property
    def h2d_bytes(self) -> int:
        """Bytes a step copies from the host to the device."""
        return sum(planned.step.h2d_bytes for planned in self._planned)

    @property
    def d2h_bytes(self) -> int:
        """Bytes a step copies from the device to the host."""
        return sum(planned.step.d2h_bytes for planned in self._planned)

    @property
    def carried_bytes(self) -> int:
        """The part of :attr:`h2d_bytes` that is skipped after an unchanged step."""
        return sum(planned.step.carried_bytes for planned in self._planned)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of forward and backward."""
        return sum(planned.step.step_seconds for planned in self._planned)

    def print_readable(self, *, print_output: bool = True) -> str:
        """The annotated forward and backward graphs.

        Args:
            print_output: also print them.

        Returns:
            The text.
        """
        text = "\n".join(
            readable(graph, planned.step, direction)
            for planned in dict.fromkeys(self._planned)
            for direction, graph in planned.graphs.items()
        )
        if print_output:
            print(text)
        return text

    def __str__(self) -> str:
        """The plan's tables; graphs that run by the same plan share them."""
        sections = []
        for planned in dict.fromkeys(self._planned):
            if len(self._planned) > 1:
                places = [i + 1 for i, other in enumerate(self._planned) if other is planned]
                which = ", ".join(map(str, places))
                sections.append(f"Graph {which} of {len(self._planned)} in this step")
            step = planned.step
            sections += [totals_table(step), chunk_table(step), schedule_table(step)]
        return "\n\n".join(sections)

    def __repr__(self) -> str:
        """One line."""
        actions = sum(len(planned.step.schedule.actions) for planned in self._planned)
        graphs = f"{len(self._planned)} graphs, " if len(self._planned) > 1 else ""
        return (
            f"<Plan: {graphs}{len(self.chunks)} chunks, {len(self.moments)} moments, "
            f"{actions} actions>"
        )


def last_plan(model: nn.Module) -> Plan:
    """The plan of the last step that a compiled model ran (of training or inference).

    Args:
        model: what ``torch.compile`` returned, or the module itself.

    Raises:
        TypeError: if it is no module.
        ValueError: if the model has not run yet, or ran its last step without a plan.
    """
    module = uncompiled(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"last_plan() takes the model, a torch.nn.Module, got {module!r}")
    engine = None
    if isinstance(module, ManagedModule):
        engine = engine_of(model)
    else:
        for parameter in module.parameters():
            engine = engine_of_parameter.get(parameter, engine)
    if engine is not None and not engine.ran and engine.ran_on_demand:
        raise ValueError(
            "the last step of this model ran without a plan: its parameters were fetched on "
            "demand. Compile it with torch.compile(model, backend='patrickstar'); if it is "
            "compiled, PyTorch could not trace what reads the parameters (it does not trace RNN, "
            "LSTM and GRU modules): TORCH_LOGS=graph_breaks says why"
        )
    if engine is None or not engine.ran:
        raise ValueError(
            "this model has run no plan yet: compile it with "
            "torch.compile(model, backend='patrickstar') and call it once"
        )
    parts: list[Planned] = []
    alone: dict[Planned, Planned] = {}
    for ran in engine.ran:
        assert isinstance(ran.source, Planned)
        if engine.step_ended and not ran.backward:
            # Parts that run by the same plan stay the same.
            parts.append(alone.setdefault(ran.source, ran.source.forward_alone()))
        else:
            parts.append(ran.source)
    return Plan(parts)
