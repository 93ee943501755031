"""The run-time state of one managed model: arena, chunks, streams, gradients, counters."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from passes.plan import Chunk, Home
from pstar_compile.config import ManageConfig, format_bytes
from pstar_compile.hardware import host_memory_bytes
from pstar_compile.runtime.arriving import settle
from pstar_compile.runtime.cpu import CpuStreams
from pstar_compile.runtime.cuda import CudaStreams
from pstar_compile.runtime.gradients import Gradients
from pstar_compile.runtime.memory import HostPool
from pstar_compile.runtime.on_demand import OnDemand
from pstar_compile.runtime.parameter import ManagedParameter, masters
from pstar_compile.runtime.stats import Counters, Stats
from pstar_compile.runtime.store import StoredChunk
from pstar_compile.runtime.streams import Event, Streams
from pstar_compile.runtime.updates import Updates
from pstar_compile.runtime.watched import touch
from pstar_compile.torch_compat import backward_id, without_dynamo

log = logging.getLogger(__name__)

_UNPLANNED = 0.03
"""Part of a GPU's memory that plans leave to the CUDA context and to the allocator's fragments when
no budget is given."""


@dataclass(slots=True)
class Turn:
    """The state between a forward and its backward: what the backward may build on."""

    bound: object
    events: dict[int, Event]
    versions: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Ran:
    """A graph that ran forward in the step.

    Attributes:
        bound: its plan, bound to the parameters it ran with.
        source: what to show the user as that plan.
        backward: whether its backward ran as well.
    """

    bound: object
    source: object
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """Bytes ``[start, end)`` of the arena that an offload still reads until ``event``."""

    start: int
    end: int
    event: Event


@dataclass(frozen=True, slots=True)
class Held:
    """A gradient whose memory an offload still reads until ``event``."""

    event: Event
    grads: tuple[Tensor, ...]


class Engine:
    """Owns all memory and streams of one managed model, and no decision about them."""

    def __init__(self, config: ManageConfig, parameters: Sequence[ManagedParameter]) -> None:
        self.config = config
        self.parameters = tuple(parameters)
        cuda = config.device.type == "cuda"
        self.streams: Streams = CudaStreams(config.device) if cuda else CpuStreams()
        self.pool = HostPool(pinned=self.streams.pinned)
        self.gradients = Gradients(self.end_step)
        self.counters = Counters()
        self.on_demand = OnDemand(config.device, self._on_demand_limit, self.counters)
        self.chunk_of: dict[ManagedParameter, StoredChunk] = {}
        self.arena: Tensor | None = None
        self.arena_generation = 0
        self._staging: Tensor | None = None
        self.resident: dict[StoredChunk, int] = {}
        # The latest fetch of each chunk that was ever resident.
        self.arrival: dict[StoredChunk, Event] = {}
        self.turn: Turn | None = None
        self._leaving: list[Leaving] = []
        self._held: dict[StoredChunk, Held] = {}
        self._held_by: object = None
        # Compiled graph -> its state, which lives as long as the model does.
        self.compiled: dict[Any, Any] = {}
        # What updates the model states, if a ChunkedOptimizer does.
        self.updates: Updates | None = None
        # What ran forward in the step, in order.
        self.ran: list[Ran] = []
        self.running = False
        # One run at a time: the arena and the counters are shared by all callers.
        self.lock = threading.RLock()
        # Whether the step's backward is over, so that what has not run by now never will.
        self.step_ended = True
        self._with_gradients = True
        self._step_graphs: set[object] = set()
        for parameter in parameters:
            parameter.engine = self

    @property
    def homes(self) -> set[Home]:
        """Where chunks are at home; empty before the first plan."""
        return {chunk.layout.home for chunk in self.chunk_of.values()}

    def device_budget(self) -> int | None:
        """Bytes of device memory the step may use; None: unlimited."""
        if self.config.device_memory is not None:
            return self.config.device_memory
        if self.config.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.config.device).total_memory
            return int(total * (1 - _UNPLANNED))
        return None

    def host_budget(self) -> int | None:
        """Bytes of host memory that model states may use; None: unlimited."""
        if self.config.host_memory is None and self.config.device.type == "cuda":
            return host_memory_bytes()
        return self.config.host_memory

    def adopt(self, layouts: Sequence[Chunk], parameters: Sequence[ManagedParameter]) -> None:
        """Create the memory of new chunks and move their masters to their home.

        ``parameters`` are indexed by the layouts' slots.
        """
        started = time.perf_counter()
        for layout in layouts:
            members = [parameters[slot.parameter] for slot in layout.content]
            # The first call may be one in inference mode; masters must not become its tensors.
            with torch.inference_mode(False):
                chunk = StoredChunk(
                    members, layout, device=self.config.device, pinned=self.streams.pinned
                )
            for member in members:
                self.chunk_of[member] = chunk
        log.debug("%d chunks in place: %.2f s", len(layouts), time.perf_counter() - started)

    def move(self, chunk: StoredChunk, layout: Chunk) -> None:
        """Move a chunk's model states to where a new plan has them, between steps."""
        touch(p.master for p in chunk.parameters)
        self.streams.synchronize()
        self.resident.pop(chunk, None)
        with torch.inference_mode(False):
            chunk.move(layout)
        if self.updates is not None:
            self.updates.move(chunk)
        log.info("chunk of %s moved to the %s", chunk.parameters[0].name, layout.home)

    def ensure_arena(self, nbytes: int) -> Tensor:
        """The arena, at least ``nbytes`` long. A new one is empty."""
        if self.arena is None or self.arena.nbytes < nbytes:
            self.release_arena()
            with torch.inference_mode(False):
                self.arena = torch.empty(nbytes, dtype=torch.uint8, device=self.config.device)
            self.arena_generation += 1
        return self.arena

    def ensure_staging(self, nbytes: int) -> Tensor:
        """Device memory in which fetched masters are cast, at least ``nbytes`` long."""
        if self._staging is None or self._staging.nbytes < nbytes:
            if self._staging is not None:
                self.streams.synchronize()
            with torch.inference_mode(False):
                self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self.config.device)
        return self._staging

    def replan(self) -> None:
        """Model states need other room than the plans so far were made for."""
        for state in self.compiled.values():
            for program in state.programs:
                program.replan()

    def release_arena(self) -> None:
        """Give the arena's memory back; what was resident must be fetched again."""
        if self.arena is not None:
            self.streams.synchronize()
        self.arena = self._staging = None
        self.resident.clear()
        self.turn = None

    def leaves(self, leaving: Leaving) -> None:
        """An offload was started that later runs must not overtake."""
        self._leaving.append(leaving)

    def still_leaving(self) -> tuple[Leaving, ...]:
        """The offloads of earlier runs that may still read the arena."""
        self._leaving = [each for each in self._leaving if not each.event.reached()]
        return tuple(self._leaving)

    def hold(self, owner: object, chunk: StoredChunk, held: Held) -> None:
        """Keep a gradient's memory while it leaves; ``owner`` is the plan that will discard it."""
        # A second backward without a forward between may come before the first has left.
        self.discard(chunk)
        self._held[chunk] = held
        self._held_by = owner

    def discard(self, chunk: StoredChunk) -> None:
        """Give a held gradient's memory back, once the compute stream is behind its offload."""
        held = self._held.pop(chunk, None)
        if held is not None:
            self.streams.wait(held.event)

    def discard_others(self, owner: object) -> None:
        """Discard what another plan holds: this one does not know of it."""
        if self._held_by is not owner:
            for chunk in list(self._held):
                self.discard(chunk)

    def call_begins(self) -> None:
        """A compiled graph is called. A call with gradients and one without are no one step."""
        with_gradients = torch.is_grad_enabled()
        if not self._inside_a_step() and with_gradients != self._with_gradients:
            self._with_gradients = with_gradients
            self.end_step()

    def start_step_if_due(self, graph: object) -> None:
        """Reset the counters when a new step begins: with the first forward after a backward, or
        when a graph runs forward that ran in this step already.
        """
        if not self._inside_a_step() and (self.step_ended or graph in self._step_graphs):
            self.step_ended = False
            self._step_graphs.clear()
            self.ran.clear()
            self.counters.start_step()
            self.streams.start_step()
        self._step_graphs.add(graph)

    def _inside_a_step(self) -> bool:
        """Whether a forward that runs now is part of another one, or of a backward: activation
        checkpointing repeats it there, and calls it without gradients before.
        """
        return self.on_demand.in_forward or backward_id() != -1

    def end_step(self) -> None:
        """The next forward begins a new step."""
        self.step_ended = True

    @property
    def ran_on_demand(self) -> bool:
        """Whether a forward outside a plan is part of the step."""
        return None in self._step_graphs

    def ran_backward(self, bound: object) -> None:
        """A backward is complete: that of the latest forward of its plan that has had none."""
        for ran in reversed(self.ran):
            if ran.bound is bound and not ran.backward:
                ran.backward = True
                return

    # Dynamo must not look into these when they run between the pieces of a broken graph.
    @without_dynamo
    def begin_eager_forward(self) -> None:
        """A forward outside a plan begins: every fetch is on demand."""
        if not self._inside_a_step():
            self.gradients.drop_abandoned()
        self.start_step_if_due(None)
        self.on_demand.begin_forward()

    @without_dynamo
    def end_eager_forward(self) -> None:
        """The forward outside a plan that began last ends."""
        self.on_demand.end_forward()

    def stats(self) -> Stats:
        """What the last step did."""
        return self.counters.stats(self.streams.waited_seconds())

    def abandon_run(self) -> None:
        """Return to a clean state after an exception inside a run."""
        self.streams.synchronize()
        self.resident.clear()
        self.turn = None
        self._leaving.clear()
        self._held.clear()
        self.running = False
        self.step_ended = True

    def close(self) -> None:
        """Give every master a storage of its own and end the streams."""
        touch(p.master for p in self.parameters)
        if self.updates is not None:
            self.updates.close()
        self.release_arena()
        self.streams.synchronize()
        self.on_demand.close()
        for parameter in self.parameters:
            settle(parameter.master)
        for chunk in dict.fromkeys(self.chunk_of.values()):
            chunk.release_masters()
        self.chunk_of.clear()
        self.streams.close()
        for parameter in self.parameters:
            parameter.engine = None
            masters.pop(parameter.master, None)

    def __del__(self) -> None:
        """Let copies end before the memory that they read is freed with the model."""
        if not sys.is_finalizing() and (self._leaving or self._held):
            self.streams.synchronize()

    def _on_demand_limit(self, parameter: ManagedParameter) -> int | None:
        chunk = self.chunk_of.get(parameter)
        if chunk is not None and chunk.layout.home is Home.DEVICE:
            return None
        limits = [b for b in (self.config.device_memory, self.config.arena_memory) if b is not None]
        if limits:
            budget = min(limits)
        elif self.config.device.type == "cuda":
            # Without a plan nothing says what the activations need: half is left to them.
            total = self.device_budget()
            assert total is not None
            budget = total // 2
        else:
            return None
        budget -= sum(c.layout.device_bytes for c in dict.fromkeys(self.chunk_of.values()))
        room = budget - (0 if self.arena is None else self.arena.nbytes)
        if self.arena is not None and parameter.nbytes > room and not self.running:
            self.release_arena()
        return budget - (0 if self.arena is None else self.arena.nbytes)

    def describe(self) -> str:
        """One line for logs."""
        total = sum(p.nbytes for p in self.parameters)
        return f"{len(self.parameters)} parameters, {format_bytes(total)} of compute copies"
