"""A compiled step: its segments' code, its plans for the sizes seen so far, and its bindings.

A program is a template over anchors. Equal blocks that are compiled one by one share one program;
each block's parameters are bound to it when they first come along.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from passes.explain import explain
from passes.forward import forward_alone
from passes.graph import alias_root
from passes.insert import insert
from passes.limits import Choices, Limits
from passes.pipeline import Captured, Outline, finish, lives, peaks
from passes.plan import Chunk, Direction, PlanError, Rates, StepPlan
from pstar_compile import ops
from pstar_compile.capture import SizeSource
from pstar_compile.compile_segments import CompiledSegments
from pstar_compile.runtime.engine import Engine
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.runtime.run import BoundPlan, Run
from pstar_compile.torch_compat import mark_boxed, run_boxed, storage_is_alive, weak_storage

log = logging.getLogger(__name__)

_REMEMBERED_SIZES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """How the arguments of a program's graphs are laid out.

    Attributes:
        forward_anchors: position of each parameter's anchor among the forward's arguments.
        backward_anchors: the same for the backward, for the parameters whose anchor it gets.
        anchor_gradients: backward output position -> parameter whose anchor's gradient it is.
        symbols: symbolic size -> where the forward's arguments tell it.
    """

    forward_anchors: tuple[int, ...]
    backward_anchors: Mapping[int, int]
    anchor_gradients: Mapping[int, int]
    symbols: Mapping[sympy.Symbol, SizeSource]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A step plan with the outer graphs that run it, and the rates that it was made for."""

    step: StepPlan
    graphs: Mapping[Direction, fx.GraphModule]
    rates: Rates

    def forward_alone(self) -> Planned:
        """What ran of it where only its forward did."""
        return Planned(
            step=forward_alone(self.step, self.rates),
            graphs={Direction.FORWARD: self.graphs[Direction.FORWARD]},
            rates=self.rates,
        )


class _Variant:
    """One plan of a program, with its outer graphs."""

    def __init__(self, program: Program, plan: StepPlan, live_bytes: int) -> None:
        # Peak of non-model data that the plan was made for.
        self.live_bytes = live_bytes
        # Whether new forwards must take another plan.
        self.retired = False
        outline = program.outline
        backward_start = len(outline.forward)
        by_direction: dict[Direction, list[Any]] = {d: [] for d in Direction}
        for action in plan.schedule.actions:
            forward = action.moment < backward_start
            by_direction[Direction.FORWARD if forward else Direction.BACKWARD].append(action)
        self.contributions: dict[int, tuple[int, ...]] = {}
        graphs: dict[Direction, fx.GraphModule] = {}
        for direction, source, segments, first in (
            (Direction.FORWARD, outline.captured.forward, outline.forward, 0),
            (Direction.BACKWARD, outline.captured.backward, outline.backward, backward_start),
        ):
            if source is None:
                continue
            graphs[direction], contributions = insert(
                source,
                segments,
                by_direction[direction],
                plan.chunks,
                program.compiled.code,
                first_moment=first,
            )
            self.contributions.update(contributions)
        self.planned = Planned(step=plan, graphs=graphs, rates=program._rates)
        self.forward = run_boxed(graphs[Direction.FORWARD])
        self.backward = (
            run_boxed(graphs[Direction.BACKWARD]) if Direction.BACKWARD in graphs else None
        )
        self.bound: dict[tuple[int, ...], BoundPlan] = {}


class Program:
    """A step compiled for any parameters with the same layout, and any sizes."""

    def __init__(
        self,
        *,
        engine: Engine,
        outline: Outline,
        compiled: CompiledSegments,
        signature: Signature,
        limits: Callable[[], Limits],
        choices: Callable[[], Choices],
        rates: Rates,
        trust: bool,
    ) -> None:
        self.outline = outline
        self.compiled = compiled
        self._engine = engine
        self._signature = signature
        self._limits = limits
        self._choices = choices
        self._rates = rates
        self._trust = trust
        self._variants: list[_Variant] = []
        self._by_sizes: dict[tuple[int, ...], _Variant] = {}
        # What the masters' version counters were, by the storage of a value that each forward
        # saved: a backward may come after other forwards, and after an optimizer's step.
        self._witness = _witness(outline.captured)
        self._versions: dict[object, tuple[int, ...]] = {}

    def missing_bytes(self) -> int:
        """Bytes of device memory that a step of the traced sizes lacks; 0: it fits, or other limits
        than the device's memory keep it from fitting.
        """
        sizes = self.outline.captured.symbols
        try:
            self._plan(sizes)
        except PlanError as error:
            given = self._given(sizes)
            given["limits"] = replace(given["limits"], budget_bytes=None)
            try:
                finish(self.outline, **given)
            except PlanError:
                return 0
            return error.needed_bytes - error.available_bytes
        return 0

    def plan_fixed_sizes(self) -> None:
        """Plan the step if its sizes are fixed: what cannot fit is refused at compile time. Others
        are planned by the call that brings them: that one size does not fit must not refuse those
        that do.

        Raises:
            PlanError: if the step cannot fit.
        """
        if not self._signature.symbols:
            self._variant(self.outline.captured.symbols)

    @property
    def forward(self) -> Callable[[list[Any]], Any]:
        """The forward (or inference) graph as AOTAutograd calls it."""
        return _call_weakly(self, Program._run_forward)

    @property
    def backward(self) -> Callable[[list[Any]], Any]:
        """The backward graph as AOTAutograd calls it."""
        return _call_weakly(self, Program._run_backward)

    def can_bind(self, parameters: Sequence[ManagedParameter]) -> bool:
        """Whether the parameters' chunks have, or can be given, the layout that was compiled."""
        return self._resolve(parameters) is not None

    def _resolve(self, parameters: Sequence[ManagedParameter]) -> list[ManagedParameter] | None:
        """All parameters of the plan, by index: the given ones, and those that share a chunk."""
        found: dict[int, ManagedParameter] = dict(enumerate(parameters))
        for chunk in self.outline.chunks:
            members = [found.get(slot.parameter) for slot in chunk.content]
            stored = {self._engine.chunk_of.get(p) for p in members if p is not None}
            if stored == {None} and None not in members:
                continue
            if len(stored) != 1 or None in stored:
                return None
            (existing,) = stored
            assert existing is not None
            if _geometry(existing.layout) != _geometry(chunk):
                return None
            for slot, parameter in zip(chunk.content, existing.parameters, strict=True):
                if found.setdefault(slot.parameter, parameter) is not parameter:
                    return None
        return [found[i] for i in range(len(found))]

    def _run_forward(self, args: list[Any]) -> Any:
        sizes = {s: source.read(args) for s, source in self._signature.symbols.items()}
        key = tuple(sizes.values())
        variant = self._by_sizes.get(key)
        pointers = tuple(args[i].data_ptr() for i in self._signature.forward_anchors)
        bound = None if variant is None else variant.bound.get(pointers)
        if bound is not None and not bound.is_current():
            # Another plan moved states, and this one must reckon with it. A backward may still
            # come for its last forward, so it is only kept from new ones.
            self.replan()
            variant = bound = None
        if variant is None:
            variant = self._remember(key, self._variant(sizes))
            bound = variant.bound.get(pointers)
        if bound is None:
            bound = self._bind(variant, [args[i] for i in self._signature.forward_anchors])
            variant.bound[pointers] = bound
        outputs = self._execute(variant.forward, bound, Direction.FORWARD, args)
        if self._witness is not None:
            self._versions = {
                storage: versions
                for storage, versions in self._versions.items()
                if storage_is_alive(storage)
            }
            self._versions[weak_storage(outputs[self._witness[0]])] = bound.versions()
        return outputs

    def _run_backward(self, args: list[Any]) -> Any:
        variant, bound = self._matching_forward(args)
        assert variant.backward is not None
        if self._witness is not None:
            versions = self._versions.get(weak_storage(args[self._witness[1]]))
            if versions is not None:
                bound.check_versions(versions)
        outputs = list(self._execute(variant.backward, bound, Direction.BACKWARD, args))
        for position, parameter in self._signature.anchor_gradients.items():
            outputs[position] = bound.parameters[parameter].zero
        return tuple(outputs)

    def _matching_forward(self, args: list[Any]) -> tuple[_Variant, BoundPlan]:
        """The plan and binding whose forward this backward belongs to."""
        anchors = {p: args[i].data_ptr() for p, i in self._signature.backward_anchors.items()}
        turn = self._engine.turn
        candidates = [
            (variant, pointers, bound)
            for variant in self._variants
            for pointers, bound in variant.bound.items()
            if all(pointers[p] == pointer for p, pointer in anchors.items())
        ]
        for variant, _, bound in candidates:
            if turn is not None and turn.bound is bound:
                return variant, bound
        variant, _, bound = candidates[-1]
        return variant, bound

    def _execute(
        self,
        graph: Callable[[list[Any]], Any],
        bound: BoundPlan,
        direction: Direction,
        args: list[Any],
    ) -> Any:
        engine = self._engine
        with engine.lock, torch.no_grad():
            run = Run(bound, direction, trust=self._trust)
            values = [run, *args]
            args.clear()
            try:
                outputs = graph(values)
            except BaseException:
                engine.abandon_run()
                raise
            run.finish(
                forward=direction is Direction.FORWARD,
                backward_follows=bool(self.outline.backward),
            )
        return outputs

    def replan(self) -> None:
        """Make new plans from here: the model states are elsewhere, or need other room."""
        for variant in self._variants:
            variant.retired = True
        self._by_sizes.clear()

    def _remember(self, key: tuple[int, ...], variant: _Variant) -> _Variant:
        if len(self._by_sizes) >= _REMEMBERED_SIZES:
            self._by_sizes.clear()
        self._by_sizes[key] = variant
        return variant

    def _variant(self, sizes: Mapping[sympy.Symbol, int]) -> _Variant:
        """A plan that holds for these sizes: a known one if it has the room, or a new one."""
        try:
            return self._plan(sizes)
        except PlanError as error:
            fixed = self.outline.chunks if self._variants else self.outline.fixed
            raise explain(error, self.outline, fixed=fixed, **self._given(sizes)) from None

    def _plan(self, sizes: Mapping[sympy.Symbol, int]) -> _Variant:
        """The same; its error is not explained."""
        given = self._given(sizes)
        need = max(peaks(self.outline, given["internal"], given["symbols"]), default=0)
        for variant in self._variants:
            if not variant.retired and need <= variant.live_bytes:
                return variant
        variant = _Variant(self, finish(self.outline, **given), need)
        self._variants.append(variant)
        return variant

    def _given(self, sizes: Mapping[sympy.Symbol, int]) -> dict[str, Any]:
        """What ``finish`` takes beside the outline."""
        sizes = {**self.outline.captured.symbols, **sizes}
        internal = self.compiled.internal(self.outline.segments, lives(self.outline, sizes))
        return {
            "internal": internal,
            "symbols": sizes,
            "limits": self._limits(),
            "choices": self._choices(),
            "rates": self._rates,
        }

    def _bind(self, variant: _Variant, anchors: Sequence[Tensor]) -> BoundPlan:
        parameters = self._resolve([_managed(anchor) for anchor in anchors])
        assert parameters is not None, "the caller asks can_bind first"
        self._engine.adopt(
            [
                chunk
                for chunk in variant.planned.step.chunks
                if parameters[chunk.content[0].parameter] not in self._engine.chunk_of
            ],
            parameters,
        )
        for chunk in variant.planned.step.chunks:
            stored = self._engine.chunk_of[parameters[chunk.content[0].parameter]]
            if not stored.is_at(chunk):
                self._engine.move(stored, chunk)
        return BoundPlan(
            self._engine,
            variant.planned.step,
            parameters,
            [s.parameters for s in self.outline.segments],
            variant.contributions,
            source=variant.planned,
        )


def _call_weakly(
    program: Program, method: Callable[[Program, list[Any]], Any]
) -> Callable[[list[Any]], Any]:
    """A boxed callable that does not keep the program, and so the model's memory, alive: Dynamo
    keeps compiled code for as long as the process runs.
    """
    reference = weakref.ref(program)

    def call(args: list[Any]) -> Any:
        program = reference()
        if program is None:
            raise RuntimeError(
                "this compiled graph's model is unmanaged or gone; compile the model again"
            )
        return method(program, args)

    return mark_boxed(call)


def _witness(captured: Captured) -> tuple[int, int] | None:
    """Position of a saved value among the forward's outputs and the backward's arguments; one
    that the forward computes, so that no two forwards share its storage.
    """
    if captured.backward is None:
        return None
    outputs = list(cast(Sequence[Any], captured.forward.graph.output_node().args[0]))
    for position, node in enumerate(captured.backward.graph.find_nodes(op="placeholder")):
        saved = captured.saved.get(node)
        if (
            saved is not None
            and isinstance(saved.meta.get("val"), Tensor)
            and alias_root(saved).op != "placeholder"
        ):
            return outputs.index(saved), position
    return None


def _geometry(chunk: Chunk) -> tuple[object, ...]:
    return (
        chunk.dtype,
        tuple((s.offset, s.nbytes) for s in chunk.content),
    )


def _managed(anchor: Tensor) -> ManagedParameter:
    owner = ops.owner_of(anchor)
    if not isinstance(owner, ManagedParameter):
        raise RuntimeError(
            "a compiled graph was called with the parameters of a model that is no longer "
            "managed; compile the model again"
        )
    return owner
