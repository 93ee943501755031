"""The ``patrickstar`` backend of ``torch.compile``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from passes.graph import META, memory_nodes
from passes.limits import Choices, Limits
from passes.pipeline import Captured, Outline, estimated_peak, outline
from passes.plan import Chunk, Parameter
from passes.recompute import lower
from pstar_compile import ops
from pstar_compile.capture import (
    Partitioned,
    anchor_positions,
    copied,
    inner_symbols,
    partition,
    saved_anchor_positions,
    sparse_gradients,
    symbols_of,
    tag,
)
from pstar_compile.compile_segments import compile_segments
from pstar_compile.config import BackendConfig, ManageConfig
from pstar_compile.hardware import library_bytes, rates_of
from pstar_compile.program import Program, Signature
from pstar_compile.refusal import refuse_at_call
from pstar_compile.runtime.engine import Engine
from pstar_compile.runtime.parameter import ManagedParameter, masters, written_in_forward
from pstar_compile.states import states_of
from pstar_compile.torch_compat import (
    aot_compile,
    inductor_decompositions,
    saved_fraction,
    wake_compile_workers,
)
from pstar_compile.writes import reading_fetches_last, take_written

log = logging.getLogger(__name__)

engine_of_parameter = WeakIdKeyDictionary()
"""Engines of models that were compiled without ``manage``, by parameter."""


def patrickstar(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph into a step that runs by a plan.

    Registered as ``torch.compile(model, backend="patrickstar", options={...})``.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs; anchors stand for the managed parameters.
        options: see :class:`pstar_compile.config.BackendConfig`.
        mode: a torch.compile mode; the plan decides what modes would, so only "default" is taken.

    The first call raises a ValueError for an unknown option, for a forward that writes to a
    parameter in place or gives one a sparse gradient, or for a step that cannot fit the budget
    (``PlanError``).
    """
    return refuse_at_call(lambda: _compile(gm, example_inputs, options, mode))


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
) -> _CompiledGraph:
    if mode not in (None, "default"):
        log.warning("mode=%r is ignored: backend 'patrickstar' has options instead of modes", mode)
    config = BackendConfig.parse(options)
    parameters: dict[int, ManagedParameter] = {}
    for position, value in enumerate(example_inputs):
        owner = ops.owner_of(value)
        if isinstance(owner, ManagedParameter):
            parameters[position] = owner
    engines = {p.engine for p in parameters.values()}
    if len(engines) > 1:
        raise ValueError(
            "one compiled graph uses parameters of several managed models; compile each managed "
            "model on its own (torch.compile(teacher), torch.compile(student))"
        )
    if parameters:
        (engine,) = engines
        assert engine is not None
    else:
        engine = _engine_without_manage(gm, example_inputs)
    return _CompiledGraph(gm, example_inputs, parameters, engine, config)


_warned_unmanaged = False


def _engine_without_manage(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Engine:
    """An engine for a graph without anchors: everything stays where it is."""
    global _warned_unmanaged
    plain = [
        v
        for v in (*example_inputs, *gm.parameters())
        if isinstance(v, nn.Parameter) and v not in masters
    ]
    if plain and not _warned_unmanaged:
        _warned_unmanaged = True
        log.warning(
            "the compiled model is not managed, so its parameters stay where they are; "
            "pstar_compile.manage(model, device_memory=...) before torch.compile pages them"
        )
    tensors = [v for v in example_inputs if isinstance(v, Tensor)]
    device = next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
    engine = Engine(ManageConfig(device=device), ())
    for parameter in plain:
        engine_of_parameter[parameter] = engine
    return engine


@dataclass(slots=True)
class CompiledState:
    """What a compiled graph keeps in its model's engine.

    Attributes:
        programs: its programs, one for each time AOTAutograd compiled it.
        parameters: the managed parameters behind each tuple of anchors seen so far.
    """

    programs: list[Program] = field(default_factory=list)
    parameters: dict[tuple[int, ...], list[ManagedParameter]] = field(default_factory=dict)


_LESS_SAVED = (
    "activation_memory_budget was lowered from %g to %g, so that the step fits: the backward "
    "computes more activations again"
)


class _SavesTooMuchError(Exception):
    """The step does not fit, and should with this fraction of the saved activations."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction


class _CompiledGraph:
    """One Dynamo graph, compiled; and the graph itself, for calls the program cannot serve."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        parameters: dict[int, ManagedParameter],
        engine: Engine,
        config: BackendConfig,
    ) -> None:
        self._gm = gm
        # The engine owns the programs; Dynamo owns this object and keeps it while the process
        # runs, so it must not keep the model's memory alive.
        self._engine_reference = weakref.ref(engine)
        self._own_engine = None if engine.parameters else engine
        self._config = config
        self._rates = rates_of(engine.config.device)
        self._choices = Choices(
            prefetch=config.prefetch,
            chunk_bytes=config.chunk_target,
            carry=config.trust_version_counters,
        )
        self._positions = tuple(parameters)
        self._example_parameters = [weakref.ref(p) for p in parameters.values()]
        self._index_of_input = {position: i for i, position in enumerate(parameters)}
        engine.compiled[self] = CompiledState()
        self._partitioned: Partitioned | None = None
        # What may be saved of the activations that are saved by default, at first and now.
        self._fractions = (saved_fraction(), saved_fraction())
        # The joint graph's partition for another such fraction.
        self._partition_at: Callable[[float], Partitioned] | None = None
        if config.inner == "inductor" and engine.config.device.type == "cuda":
            wake_compile_workers()
        # A refusal waits for a call with the masters' present requires_grad: the anchors that were
        # traced may be behind it.
        self._compiled = refuse_at_call(lambda: self._compile_until_it_fits(example_inputs))
        self._partitioned = self._partition_at = None

    def _compile_until_it_fits(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph, again with more recomputation while its activations are too many."""
        while True:
            try:
                return self._aot_compile(example_inputs)
            except _SavesTooMuchError as error:
                self._fractions = (self._fractions[0], error.fraction)
                log.info(
                    "the step does not fit; compiling again with %.0f %% of the activations saved",
                    100 * error.fraction,
                )

    def _aot_compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inductor = self._config.inner == "inductor"
        with reading_fetches_last(self._gm):
            return aot_compile(
                self._gm,
                example_inputs,
                forward=self._compile_forward,
                backward=self._compile_backward,
                inference=self._compile_inference,
                partition=self._partition,
                decompositions=inductor_decompositions() if inductor else {},
            )

    def __call__(self, *args: Any) -> Any:
        """Run the graph; returns Dynamo's outputs."""
        pointers = tuple(args[i].data_ptr() for i in self._positions)
        engine = self._engine
        engine.call_begins()
        state = engine.compiled[self]
        parameters = state.parameters.get(pointers)
        if parameters is None:
            parameters = []
            for position in self._positions:
                owner = ops.owner_of(args[position])
                assert isinstance(owner, ManagedParameter)
                parameters.append(owner)
            state.parameters[pointers] = parameters
        # Of every parameter, also behind a difference: all() would stop at the first.
        changed = [p for p in parameters if _check(p)]
        if changed or not all(program.can_bind(parameters) for program in state.programs):
            # Freezing or unfreezing moves the anchors' requires_grad, so the next call compiles
            # anew; this one already passed its guards.
            log.info(
                "running one call on demand: %s",
                "requires_grad changed" if changed else "its parameters are chunked differently",
            )
            engine.begin_eager_forward()
            try:
                return self._gm(*args)
            finally:
                engine.end_eager_forward()
        return self._compiled(*args)

    @property
    def _engine(self) -> Engine:
        engine = self._engine_reference()
        if engine is None:
            raise RuntimeError(
                "this compiled graph's model is unmanaged or gone; compile the model again"
            )
        return engine

    def _members(self) -> list[ManagedParameter]:
        """The parameters that the graph was compiled with."""
        found = [reference() for reference in self._example_parameters]
        return [p for p in found if p is not None]

    def _keep(self, program: Program) -> Program:
        self._engine.compiled[self].programs.append(program)
        return program

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._refuse_writes(joint.graph)
        self._refuse_sparse_gradients(joint.graph)
        source = copied(joint.graph) if self._engine.device_budget() is not None else None

        def partition_at(fraction: float, joint: fx.GraphModule | None = None) -> Partitioned:
            if joint is None:
                assert source is not None
                joint = fx.GraphModule(module, copied(source))
            return partition(
                joint,
                inputs,
                self._index_of_input,
                rewrite=self._config.inner == "inductor",
                saved_fraction=fraction,
                **kwargs,
            )

        module = joint
        self._partition_at = None if source is None else partition_at
        self._partitioned = partition_at(self._fractions[1], joint)
        return self._partitioned.forward, self._partitioned.backward

    def _compile_forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        assert self._partitioned is not None
        program = self._keep(self._build(gm, self._partitioned))
        self._partitioned = None
        return program.forward

    def _compile_backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return self._engine.compiled[self].programs[-1].backward

    def _compile_inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self._refuse_writes(gm.graph)
        tag(gm.graph, self._index_of_input)
        return self._keep(self._build(gm, None)).forward

    def _refuse_writes(self, graph: fx.Graph) -> None:
        written = take_written(graph, self._index_of_input)
        if written:
            members = self._members()
            raise written_in_forward(members[i] for i in written)

    def _refuse_sparse_gradients(self, joint: fx.Graph) -> None:
        sparse = sparse_gradients(joint, self._index_of_input)
        if sparse:
            members = self._members()
            raise ValueError(
                f"a compiled forward gives managed parameters sparse gradients, and a chunk has "
                f"room for dense ones only: {', '.join(repr(members[i].name) for i in sparse)}. "
                f"Make the layer with sparse=False (nn.Embedding, nn.EmbeddingBag), or keep its "
                f"call out of the compiled code (torch.compiler.disable)."
            )

    def _build(self, forward: fx.GraphModule, partitioned: Partitioned | None) -> Program:
        engine = self._engine
        backward = None if partitioned is None else partitioned.backward
        forward_anchors = anchor_positions(forward.graph, self._index_of_input)
        backward_anchors = {} if backward is None else saved_anchor_positions(backward.graph)
        symbols = symbols_of(forward.graph)
        members, fixed = _with_chunk_mates(engine, self._members())
        captured = self._captured(forward, partitioned, members)
        limits = partial(self._limits, [weakref.ref(p) for p in members])
        outlined = outline(
            captured,
            fixed=fixed,
            limits=limits(),
            choices=self._present_choices(),
            rates=self._rates,
        )
        compiled = compile_segments(
            [(s, forward) for s in outlined.forward]
            + [(s, backward) for s in outlined.backward if backward is not None],
            _fake_parameters(outlined, len(members)),
            inner=self._config.inner,
        )
        program = Program(
            engine=engine,
            outline=outlined,
            compiled=compiled,
            signature=Signature(
                forward_anchors=tuple(
                    forward_anchors[i] for i in range(len(self._example_parameters))
                ),
                backward_anchors=backward_anchors,
                anchor_gradients={} if partitioned is None else partitioned.anchor_gradients,
                symbols=symbols,
            ),
            limits=limits,
            choices=self._present_choices,
            rates=self._rates,
            trust=self._config.trust_version_counters,
        )
        if partitioned is not None and self._partition_at is not None:
            self._save_less(program.missing_bytes(), members)
        program.plan_fixed_sizes()
        return program

    def _captured(
        self,
        forward: fx.GraphModule,
        partitioned: Partitioned | None,
        members: Sequence[ManagedParameter],
    ) -> Captured:
        """What the passes get of this graph."""
        symbols = {s: source.hint for s, source in symbols_of(forward.graph).items()}
        first, fraction = self._fractions
        notes = (
            () if fraction == first or partitioned is None else (_LESS_SAVED % (first, fraction),)
        )
        return Captured(
            forward=forward,
            backward=None if partitioned is None else partitioned.backward,
            saved={} if partitioned is None else partitioned.saved,
            parameters=tuple(_describe(p) for p in members),
            symbols=inner_symbols(forward.graph) | symbols,
            whole=set(self._members()) >= {p for p in self._engine.parameters if p.nbytes},
            notes=notes,
        )

    def _save_less(self, missing_bytes: int, members: Sequence[ManagedParameter]) -> None:
        """Ask for a compilation with fewer saved activations, if that should make the step fit.

        Raises:
            _SavesTooMuchError: if it should.
        """
        partition_at = self._partition_at
        if missing_bytes <= 0 or partition_at is None:
            return

        def peak_at(fraction: float) -> int:
            tried = partition_at(fraction)
            return estimated_peak(self._captured(tried.forward, tried, members), self._rates)

        present = self._fractions[1]
        fraction = lower(present, missing_bytes, peak_at, present_peak=peak_at(present))
        if fraction is not None:
            raise _SavesTooMuchError(fraction)

    def _present_choices(self) -> Choices:
        updates = self._engine.updates
        return replace(self._choices, update=None if updates is None else updates.update_mode)

    def _limits(self, members: Sequence[weakref.ref[ManagedParameter]]) -> Limits:
        """The bounds of a plan over these parameters, as they are now."""
        engine = self._engine
        parameters = [p for reference in members if (p := reference()) is not None]
        return Limits(
            budget_bytes=engine.device_budget(),
            host_bytes=engine.host_budget(),
            arena_limit=engine.config.arena_memory,
            reserved_bytes=library_bytes(engine.config.device),
            states=states_of(engine, parameters),
        )


def _check(parameter: ManagedParameter) -> bool:
    parameter.check_identity()
    return parameter.sync_requires_grad()


def _describe(parameter: ManagedParameter) -> Parameter:
    return Parameter(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        nbytes=parameter.nbytes,
        requires_grad=parameter.master.requires_grad,
    )


def _with_chunk_mates(
    engine: Engine, parameters: Sequence[ManagedParameter]
) -> tuple[list[ManagedParameter], list[Chunk]]:
    """The parameters and all that share an existing chunk with them; and those chunks, with
    their slots numbered by position in that list.
    """
    members = list(parameters)
    stored = dict.fromkeys(engine.chunk_of[p] for p in parameters if p in engine.chunk_of)
    index = {p: i for i, p in enumerate(members)}
    for chunk in stored:
        for parameter in chunk.parameters:
            if parameter not in index:
                index[parameter] = len(members)
                members.append(parameter)
    fixed = [
        replace(
            chunk.layout,
            index=position,
            # Members may have been frozen or unfrozen since the chunk was made.
            requires_grad=any(p.master.requires_grad for p in chunk.parameters),
            content=tuple(
                replace(slot, parameter=index[parameter])
                for slot, parameter in zip(chunk.layout.content, chunk.parameters, strict=True)
            ),
        )
        for position, chunk in enumerate(stored)
    ]
    return members, fixed


def _fake_parameters(outlined: Outline, count: int) -> dict[int, Tensor]:
    """The FakeTensor of each parameter's compute copy, from the captured fetch nodes."""
    values: dict[int, Tensor] = {}
    for captured in (outlined.captured.forward, outlined.captured.backward):
        if captured is not None:
            for node in memory_nodes(captured.graph, "fetch"):
                values.setdefault(node.meta[META].parameter, node.meta["val"])
    return values
