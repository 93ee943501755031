"""One execution of a plan's forward or backward: the object whose methods the graphs call.

The outer graph of a step is a list of calls: ``run.fetch(3)``, ``run.wait(4)``, a segment,
``run.reduce(7, grad)``, ``run.offload(8)``. The number is the action's index in the plan; all that
an action needs is written there, so nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes.plan import Action, Direction, Home, Kind, StepPlan
from pstar_compile.runtime.arriving import Contribution, OnItsWay, norm_of
from pstar_compile.runtime.engine import Engine, Held, Leaving, Ran, Turn
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.runtime.store import StoredChunk
from pstar_compile.runtime.streams import Event
from pstar_compile.torch_compat import copy_all


class BoundPlan:
    """A plan template bound to the parameters of one place in the model.

    Args:
        plan: the template.
        parameters: the managed parameters, by plan index.
        segment_parameters: for each moment, the plan indices its segment takes, in order.
        contributions: for each reduce action, the plan indices of the gradients it takes.
        source: what to show the user as the plan that ran.
    """

    def __init__(
        self,
        engine: Engine,
        plan: StepPlan,
        parameters: Sequence[ManagedParameter],
        segment_parameters: Sequence[Sequence[int]],
        contributions: dict[int, tuple[int, ...]],
        *,
        source: object,
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.source = source
        self.parameters = tuple(parameters)
        self.chunks: tuple[StoredChunk, ...] = tuple(
            engine.chunk_of[parameters[c.content[0].parameter]] for c in plan.chunks
        )
        self.segment_parameters = tuple(tuple(s) for s in segment_parameters)
        self.contributions = contributions
        self.actions = plan.schedule.actions
        self.chunk_index = {
            slot.parameter: (chunk.index, position)
            for chunk in plan.chunks
            for position, slot in enumerate(chunk.content)
        }
        waited_on = {i for action in self.actions for i in action.after}
        # Chunks that the plan updates inside the backward.
        self.updated = {a.chunk for a in self.actions if a.kind in (Kind.UPDATE, Kind.UPDATE_HOST)}
        self.marked = {a.index for a in self.actions if a.index in waited_on}
        backward = {m.index for m in plan.moments if m.direction is Direction.BACKWARD}
        # Length of the buffers in which gradients wait for their update; None: as they come.
        self.gradient_slot_bytes = plan.gradient_slot_bytes
        self.turn_residents = _residents_before(self.actions, backward)
        self.backward_reads = tuple(
            sorted({p for m in backward for p in self.segment_parameters[m]})
        )
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._generation = -1

    def views(self, chunk: int, offset: int) -> list[Tensor]:
        """The parameter tensors of a chunk resident at ``offset`` of the arena."""
        if self._generation != self.engine.arena_generation:
            self._views.clear()
            self._generation = self.engine.arena_generation
        views = self._views.get((chunk, offset))
        if views is None:
            arena = self.engine.arena
            assert arena is not None
            stored = self.chunks[chunk]
            with torch.inference_mode(False):
                views = stored.views(arena[offset : offset + stored.layout.nbytes])
            self._views[chunk, offset] = views
        return views

    def is_current(self) -> bool:
        """Whether every chunk is at home where the plan takes it to be."""
        return all(
            stored.is_at(chunk) for stored, chunk in zip(self.chunks, self.plan.chunks, strict=True)
        )

    def versions(self) -> tuple[int, ...]:
        """Version counters of the masters that the backward reads."""
        return tuple(self.parameters[p].master._version for p in self.backward_reads)

    def check_versions(self, forward: tuple[int, ...]) -> None:
        """Raise if a master that the backward reads was written since its forward.

        Args:
            forward: what :meth:`versions` was then.

        Raises:
            RuntimeError: naming the parameters.
        """
        changed = [
            self.parameters[p].name
            for p, before, now in zip(self.backward_reads, forward, self.versions(), strict=True)
            if before != now
        ]
        if changed:
            self.engine.abandon_run()
            raise RuntimeError(
                f"parameters needed for the gradient computation were modified in place between "
                f"forward and backward: {', '.join(changed[:5])}"
                + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
                + "; call backward() before the optimizer's step"
            )


def _residents_before(actions: Sequence[Action], backward: set[int]) -> dict[int, Action]:
    """The fetch of each chunk that is resident when the backward begins."""
    residents: dict[int, Action] = {}
    for action in actions:
        if action.moment in backward:
            break
        assert action.chunk is not None or action.kind is Kind.COMPUTE
        if action.chunk is not None and action.kind is Kind.FETCH:
            residents[action.chunk] = action
        elif action.chunk is not None and action.kind is Kind.RELEASE:
            residents.pop(action.chunk, None)
    return residents


def _cast(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        copy_all(pairs)


class Run:
    """One pass through a plan's forward or backward graph."""

    def __init__(self, bound: BoundPlan, direction: Direction, *, trust: bool) -> None:
        self._bound = bound
        self._engine = engine = bound.engine
        self._trust = trust or direction is Direction.BACKWARD
        self._events: dict[int, Event] = {}
        self._offsets: dict[int, int] = {}
        self._reduced: set[int] = set()
        # Gradients that leave from where they were computed, by chunk.
        self._direct: dict[int, dict[int, Tensor]] = {}
        # Gradients of chunks that the plan updates, until it does.
        self._due: dict[int, dict[ManagedParameter, list[Contribution]]] = {}
        self._fence: tuple[Event, ...] = ()
        self._leaving = engine.still_leaving()
        engine.discard_others(bound)
        if engine.running:
            engine.abandon_run()
        if direction is Direction.BACKWARD and bound.updated:
            assert engine.updates is not None
            engine.updates.begin_backward()
        turn, engine.turn = engine.turn, None
        engine.running = True
        if bound.plan.schedule.arena_bytes:
            engine.ensure_arena(bound.plan.schedule.arena_bytes)
        if bound.plan.staging_bytes:
            engine.ensure_staging(bound.plan.staging_bytes)
        if direction is Direction.FORWARD:
            self._begin_forward()
        elif turn is not None and turn.bound is bound:
            self._continue(turn)
        else:
            self._begin_backward_alone()

    def _begin_forward(self) -> None:
        engine, bound = self._engine, self._bound
        engine.gradients.drop_abandoned()
        engine.start_step_if_due(bound)
        engine.ran.append(Ran(bound, bound.source))
        if not engine.on_demand.in_forward:
            engine.on_demand.drop_all()
        self._fence = (engine.streams.mark(),)
        keep: dict[StoredChunk, int] = {}
        if self._trust:
            firsts: dict[int, Action] = {}
            for action in bound.actions:
                if action.kind is Kind.FETCH and action.chunk is not None:
                    firsts.setdefault(action.chunk, action)
            for index in bound.plan.schedule.carried:
                chunk = bound.chunks[index]
                offset = firsts[index].offset
                assert offset is not None
                if engine.resident.get(chunk) == offset and chunk.unchanged():
                    keep[chunk] = offset
        engine.resident = keep

    def _leaving_from(self, action: Action) -> list[Event]:
        """What must leave an action's bytes first. The plan orders accesses within one step only;
        this orders a step behind the offloads of earlier ones, and ``_fence`` its fetches behind
        their compute.
        """
        assert action.offset is not None
        end = action.offset + action.nbytes
        return [e.event for e in self._leaving if e.start < end and action.offset < e.end]

    def _continue(self, turn: Turn) -> None:
        bound = self._bound
        bound.check_versions(turn.versions)
        self._events = turn.events
        self._offsets = {c: a.offset or 0 for c, a in bound.turn_residents.items()}

    def _begin_backward_alone(self) -> None:
        # Another run used the arena since this backward's forward: what the plan expects to be
        # resident is fetched again.
        self._fence = (self._engine.streams.mark(),)
        self._engine.resident = {}
        for action in self._bound.turn_residents.values():
            self._copy_in(action)
            self._engine.counters.on_demand(self._fetch_bytes(action))
            self._engine.streams.wait(self._events[action.index])

    def finish(self, *, forward: bool, backward_follows: bool) -> None:
        """The graph ran to its end."""
        engine = self._engine
        engine.running = False
        if not forward:
            engine.ran_backward(self._bound)
        elif backward_follows:
            engine.turn = Turn(self._bound, self._events, self._bound.versions())

    def _copy_in(self, action: Action) -> None:
        engine = self._engine
        assert action.chunk is not None and action.offset is not None and engine.arena is not None
        chunk = self._bound.chunks[action.chunk]
        after = [self._events[i] for i in action.after if i in self._events]
        after.extend(self._fence)
        after.extend(self._leaving_from(action))
        self._fence = ()
        assert chunk.buffer is not None
        destination = engine.arena[action.offset : action.offset + action.nbytes]
        unpack: Callable[[], None] | None = None
        if chunk.layout.masters:
            destination = engine.ensure_staging(chunk.buffer.nbytes)[: chunk.buffer.nbytes]
            copies = self._bound.views(action.chunk, action.offset)
            unpack = partial(_cast, list(zip(copies, chunk.staged(destination), strict=True)))
        self._events[action.index] = engine.arrival[chunk] = engine.streams.fetch(
            destination, chunk.buffer, after, chunk.preparation(trust=self._trust), unpack
        )
        chunk.fetched()
        self._offsets[action.chunk] = action.offset
        engine.resident[chunk] = action.offset
        engine.counters.arena(action.offset + action.nbytes)

    def fetch(self, index: int) -> None:
        """Start copying a chunk from its home into the arena."""
        action = self._bound.actions[index]
        assert action.chunk is not None and action.offset is not None
        chunk = self._bound.chunks[action.chunk]
        if self._engine.resident.get(chunk) == action.offset:
            # The step before may have fetched it without reading it.
            self._events[index] = self._engine.arrival[chunk]
            self._offsets[action.chunk] = action.offset
            self._engine.counters.carried_bytes += self._fetch_bytes(action)
            self._engine.counters.arena(action.offset + action.nbytes)
            return
        self._copy_in(action)
        self._engine.counters.fetches += 1
        self._engine.counters.h2d_bytes += self._fetch_bytes(action)

    def _fetch_bytes(self, action: Action) -> int:
        assert action.chunk is not None
        return self._bound.plan.chunks[action.chunk].fetch_bytes

    def wait(self, index: int) -> None:
        """Make the compute stream wait for the fetches that the action names."""
        for before in self._bound.actions[index].after:
            if before in self._events:
                self._engine.streams.wait(self._events[before])

    def arguments(self, moment: int, *inputs: Any) -> list[Any]:
        """The arguments of a moment's segment, in one list that the segment empties."""
        bound = self._bound
        arguments: list[Any] = []
        for parameter in bound.segment_parameters[moment]:
            chunk, position = bound.chunk_index[parameter]
            if bound.plan.chunks[chunk].home is Home.DEVICE:
                arguments.append(self._at_home(bound.parameters[parameter]))
            else:
                arguments.append(bound.views(chunk, self._offsets[chunk])[position])
        arguments.extend(inputs)
        return arguments

    def _at_home(self, parameter: ManagedParameter) -> Tensor:
        """The compute copy of a parameter whose home is the device, by the plan."""
        master = parameter.master
        device = self._engine.config.device
        if master.device != device:
            # Its chunk moved to the host since the forward that this backward belongs to.
            self._engine.counters.on_demand(parameter.nbytes)
        elif master.dtype == parameter.dtype:
            return master
        return master.detach().to(device=device, dtype=parameter.dtype)

    def computed(self, index: int) -> None:
        """Mark the end of a segment that later copies wait for."""
        self._events[index] = self._engine.streams.mark()

    def release(self, index: int) -> None:
        """A chunk's compute copy is not read again from this residency."""
        chunk = self._bound.actions[index].chunk
        assert chunk is not None
        self._offsets.pop(chunk, None)
        self._engine.resident.pop(self._bound.chunks[chunk], None)

    def reduce(self, index: int, *grads: Tensor) -> None:
        """Put gradient contributions into the chunk's gradient."""
        bound, engine = self._bound, self._engine
        action = bound.actions[index]
        parameters = bound.contributions[index]
        assert action.chunk is not None
        if action.offset is None:
            if bound.plan.chunks[action.chunk].home is Home.DEVICE:
                for parameter, grad in zip(parameters, grads, strict=True):
                    self._reduced_to(action.chunk, parameter, Contribution(grad, None, owned=True))
                return
            self._direct[action.chunk] = dict(
                zip(parameters, (g.contiguous() for g in grads), strict=True)
            )
            self._events[index] = engine.streams.mark()
            return
        for event in self._leaving_from(action):
            engine.streams.wait(event)
        for before in action.after:
            if before in self._events:
                engine.streams.wait(self._events[before])
        views = bound.views(action.chunk, action.offset)
        first: list[tuple[Tensor, Tensor]] = []
        for parameter, grad in zip(parameters, grads, strict=True):
            view = views[bound.chunk_index[parameter][1]]
            if parameter in self._reduced:
                copy_all(first)
                first = []
                view.add_(grad)
            else:
                self._reduced.add(parameter)
                first.append((view, grad))
        copy_all(first)
        engine.counters.arena(action.offset + action.nbytes)
        if index in bound.marked:
            self._events[index] = engine.streams.mark()

    def offload(self, index: int) -> None:
        """Start copying a chunk's finished gradient to its home."""
        bound, engine = self._bound, self._engine
        action = bound.actions[index]
        assert action.chunk is not None
        chunk, layout = bound.chunks[action.chunk], bound.plan.chunks[action.chunk]
        for before in action.after:
            if bound.actions[before].kind is Kind.UPDATE_HOST and before in self._events:
                # It gives the memory back that this gradient will lie in.
                self._events.pop(before).wait_host()
        nbytes = layout.gradient_bytes
        lease = engine.pool.lease(bound.gradient_slot_bytes or nbytes)[:nbytes]
        places = chunk.staged(lease) if layout.wide else chunk.views(lease)
        homes = dict(zip((s.parameter for s in layout.content), places, strict=True))
        after = [self._events[i] for i in action.after if i in self._events]
        norms: dict[int, Tensor] = {}
        if engine.updates is not None and engine.updates.norms:
            norms = self._norms(action)
        if action.offset is None:
            grads = self._direct.pop(action.chunk)
            event = engine.streams.offload([(homes[p], g) for p, g in grads.items()], after)
            engine.hold(bound, chunk, Held(event, tuple(grads.values())))
            arrived = set(grads)
        else:
            assert engine.arena is not None
            end = action.offset + action.nbytes
            pairs = [(lease, engine.arena[action.offset : end])]
            if layout.wide:
                views = bound.views(action.chunk, action.offset)
                pairs = list(zip(places, views, strict=True))
            event = engine.streams.offload(pairs, after)
            engine.leaves(Leaving(action.offset, end, event))
            arrived = self._reduced
        self._events[index] = event
        engine.counters.d2h_bytes += bound.plan.offload_bytes(action)
        for parameter, view in homes.items():
            if parameter in arrived:
                contribution = Contribution(view, event, owned=True, norm=norms.get(parameter))
                self._reduced_to(action.chunk, parameter, contribution)

    def _norms(self, action: Action) -> dict[int, Tensor]:
        """The 2-norm of each parameter's finished gradient, taken while it is on the device."""
        assert action.chunk is not None
        if action.offset is None:
            grads = self._direct[action.chunk]
        else:
            views = self._bound.views(action.chunk, action.offset)
            content = self._bound.plan.chunks[action.chunk].content
            grads = {
                slot.parameter: view
                for slot, view in zip(content, views, strict=True)
                if slot.parameter in self._reduced
            }
        return {p: norm_of(g) for p, g in grads.items()}

    def _reduced_to(self, chunk: int, parameter: int, contribution: Contribution) -> None:
        """A gradient contribution is at its home, or on its way there."""
        managed = self._bound.parameters[parameter]
        if chunk in self._bound.updated:
            self._due.setdefault(chunk, {}).setdefault(managed, []).append(contribution)
        else:
            self._engine.gradients.add(managed, contribution)

    def update(self, index: int) -> None:
        """Run the optimizer's step of a chunk on the device."""
        self.update_host(index)

    def update_host(self, index: int) -> None:
        """Start the optimizer's step of a chunk, behind the copies of its gradients."""
        chunk = self._bound.actions[index].chunk
        assert chunk is not None and self._engine.updates is not None
        gradients = {p: OnItsWay(c) for p, c in self._due.pop(chunk).items()}
        job = self._engine.updates.update(self._bound.chunks[chunk], gradients)
        if job is not None:
            self._events[index] = job

    def discard(self, index: int) -> None:
        """Give back the memory of a gradient that left from where it was computed."""
        action = self._bound.actions[index]
        assert action.chunk is not None
        self._engine.discard(self._bound.chunks[action.chunk])
