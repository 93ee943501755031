"""The data every pass speaks: parameters, chunks, moments, actions, and the step plan they make.

All byte counts are plain ints for one concrete set of shapes; symbolic sizes are evaluated before
a plan is made (see ``liveness``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

ALIGNMENT = 256
"""Bytes at which parameters start inside a chunk, and chunks inside the arena: Inductor copies
misaligned inputs, and CPU matmuls round differently on them."""

CAST_BYTES = 64 * 1024**2
"""Bytes of device memory in which a gradient that leaves in the masters' dtype is cast, piece by
piece."""


def align(nbytes: int) -> int:
    """Round ``nbytes`` up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Direction(StrEnum):
    """Which graph of the step a moment belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Home(StrEnum):
    """Where a chunk's masters live."""

    HOST = "host"
    DEVICE = "device"


class Stream(StrEnum):
    """The queue an action runs on. Actions on one stream run in program order."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    UPDATE = "update"


class Kind(StrEnum):
    """What an action does. See :class:`Action`."""

    FETCH = "fetch"
    WAIT = "wait"
    COMPUTE = "compute"
    RELEASE = "release"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    DISCARD = "discard"
    UPDATE = "update"
    UPDATE_HOST = "update_host"


STREAM_OF: Mapping[Kind, Stream] = {
    Kind.FETCH: Stream.H2D,
    Kind.WAIT: Stream.COMPUTE,
    Kind.COMPUTE: Stream.COMPUTE,
    Kind.RELEASE: Stream.COMPUTE,
    Kind.REDUCE: Stream.COMPUTE,
    Kind.OFFLOAD: Stream.D2H,
    Kind.DISCARD: Stream.COMPUTE,
    Kind.UPDATE: Stream.COMPUTE,
    Kind.UPDATE_HOST: Stream.UPDATE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A managed parameter as the passes see it; its identity is its index in the plan.

    ``dtype`` and ``nbytes`` are those of the compute copy. ``name`` is only a label for people.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter's place inside a chunk, in bytes from the chunk's start."""

    parameter: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Parameters that move as one contiguous buffer: one dtype, one ``requires_grad``.

    The chunk's gradient, if any, has the same layout and the same ``nbytes``. ``state_bytes`` are
    the masters, where compute copies are casts of them, and the optimizer's states; ``cast_bytes``
    the compute copies that are casts. ``masters`` is empty where a fetch copies compute copies from
    the host; else it is the layout of the masters in the host's buffer: a fetch copies those, and
    casts them on the device, so that the host needs no compute copies. If ``wide``, gradients are
    cast to the masters' dtype before they leave the device, so that the host casts nothing at all.
    """

    index: int
    home: Home
    dtype: torch.dtype
    requires_grad: bool
    content: tuple[Slot, ...]
    nbytes: int
    state_bytes: int = 0
    cast_bytes: int = 0
    masters: tuple[Slot, ...] = ()
    wide: bool = False

    @property
    def device_bytes(self) -> int:
        """Bytes that the chunk always takes of the device: none unless its home is there."""
        if self.home is Home.HOST:
            return 0
        return self.state_bytes + self.nbytes - self.cast_bytes

    @property
    def elements(self) -> int:
        """Elements of the chunk's parameters, about: padding counts."""
        return self.nbytes // self.dtype.itemsize

    @property
    def staged_bytes(self) -> int:
        """Bytes of masters that a fetch brings to the device to cast them there."""
        return self.masters[-1].offset + self.masters[-1].nbytes if self.masters else 0

    @property
    def fetch_bytes(self) -> int:
        """Bytes that a fetch copies from the host."""
        return self.staged_bytes or self.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of host memory that the chunk's gradient takes."""
        return self.staged_bytes if self.wide else self.nbytes

    @property
    def casting_bytes(self) -> int:
        """Bytes of device memory in which the gradient is cast before it leaves."""
        largest = max((s.nbytes for s in self.masters), default=0)
        return min(largest, CAST_BYTES) if self.wide else 0

    @property
    def host_casts(self) -> int:
        """Casts of the whole chunk that an update on the host takes: of its gradient, of its
        masters to the compute copies.
        """
        return 0 if not self.cast_bytes else (not self.wide) + (not self.masters)

    @property
    def host_bytes(self) -> int:
        """Bytes that the chunk always takes of the host: compute copies, and states."""
        if self.home is Home.DEVICE:
            return 0
        return self.state_bytes + (0 if self.masters else self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One segment of the step, in execution order: forward moments first, then backward.

    ``needs`` are the chunks whose parameters the segment reads; ``reduces`` the chunks that
    receive a gradient contribution when it ends. ``direct`` are those of them whose whole gradient
    it produces, in contiguous tensors that may leave as they are, each with the gradient's bytes.
    ``live_bytes`` is the peak of non-model data while it runs, ``seconds`` its predicted compute
    time.
    """

    index: int
    direction: Direction
    needs: tuple[int, ...]
    reduces: tuple[int, ...]
    seconds: float
    live_bytes: int
    direct: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One node of the generated step, in host issue order.

    =========  ====================================================================================
    fetch      bring chunk ``chunk`` from its home into ``[offset, offset + nbytes)`` of the arena
    wait       make the compute stream wait until the chunk's fetch is complete
    compute    run the segment of moment ``moment``
    release    the chunk's compute copy is not read again from this residency
    reduce     put the moment's gradient contributions to ``chunk`` into ``[offset, +nbytes)``:
               the first one of a step writes, later ones add
    offload    copy the chunk's finished gradient from ``offset`` to its home; the bytes are free
               once this action is complete
    discard    make the compute stream wait for an offload without ``offset``, and give the
               gradient's memory back
    update     run the optimizer's step of a chunk whose home is the device; its gradient is dropped
    update_    the same for a chunk whose home is the host, on the host. The next step's first fetch
    host       of the chunk waits for it
    =========  ====================================================================================

    ``after`` lists earlier actions *on other streams* whose completion this action's stream waits
    for; order inside one stream is implied. ``moment`` is the moment at which the action is
    issued: fetch and wait before or after the moment's compute as their place in the list says.
    For chunks whose home is the device, ``reduce`` has no ``offset``, and ``update`` is the only
    other action.
    A ``reduce`` and ``offload`` of a host chunk without ``offset`` leave the gradient where the
    segment put it and copy it from there (see pass ``direct``); it is discarded later in the step,
    or, if the step ends first, in the next one.
    """

    index: int
    kind: Kind
    moment: int
    chunk: int | None = None
    offset: int | None = None
    nbytes: int = 0
    after: tuple[int, ...] = ()

    @property
    def stream(self) -> Stream:
        """The stream the action runs on."""
        return STREAM_OF[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the machine does per second. Bytes per second and operations per second.

    ``h2d`` and ``d2h`` are the rates while both directions are busy. ``update_device`` and
    ``update_host`` are elements of parameters that an optimizer updates, the latter while copies
    run; ``cast_host`` are elements that the host casts between a compute copy's dtype and a
    master's.
    """

    flops: Mapping[torch.dtype, float]
    memory: float
    h2d: float
    d2h: float
    update_device: float
    update_host: float
    cast_host: float
    transfer_latency: float = 20e-6
    segment_latency: float = 30e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The order of all memory nodes of one step.

    ``carried`` are chunks that end the step resident at the very offset at which its first fetch
    puts them: a runtime that knows their masters to be unchanged may skip that fetch.
    ``gradient_slots`` are the host buffers in which gradients wait for their update in the
    backward; each is as long as the longest. None: each gradient has memory of its own.
    """

    actions: tuple[Action, ...]
    arena_bytes: int
    carried: tuple[int, ...] = ()
    gradient_slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Chunks, homes, offsets, order and predictions of one step. Made by ``pipeline``.

    ``budget_bytes`` bounds the whole step on the device, ``arena_limit`` its arena alone,
    ``host_limit`` the model states, compute copies and gradients on the host; None: not bounded.
    ``notes`` are for people.
    """

    parameters: tuple[Parameter, ...]
    chunks: tuple[Chunk, ...]
    moments: tuple[Moment, ...]
    schedule: Schedule
    budget_bytes: int | None
    reserved_bytes: int
    step_seconds: float
    wait_seconds: float
    prefetch: int | None = None
    arena_limit: int | None = None
    host_limit: int | None = None
    notes: tuple[str, ...] = ()

    def actions(self, kind: Kind | None = None) -> Iterator[Action]:
        """All actions in issue order, or those of one kind."""
        return (a for a in self.schedule.actions if kind is None or a.kind is kind)

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied from the host to the device in one step (no carried chunk skipped)."""
        fetches = self.actions(Kind.FETCH)
        return sum(self.chunks[a.chunk].fetch_bytes for a in fetches if a.chunk is not None)

    @property
    def d2h_bytes(self) -> int:
        """Bytes copied from the device to the host in one step."""
        return sum(self.offload_bytes(a) for a in self.actions(Kind.OFFLOAD))

    def offload_bytes(self, action: Action) -> int:
        """Bytes that an offload copies to the host."""
        assert action.chunk is not None
        return offload_bytes(action, self.chunks[action.chunk])

    @property
    def carried_bytes(self) -> int:
        """The part of :attr:`h2d_bytes` that a step after an unchanged step does not copy."""
        return sum(self.chunks[c].fetch_bytes for c in self.schedule.carried)

    @property
    def device_state_bytes(self) -> int:
        """Bytes of the model states of chunks whose home is the device.

        ``live_bytes`` counts their gradients, and casts of their masters while they are read.
        """
        return sum(c.device_bytes for c in self.chunks)

    @property
    def peak_host_bytes(self) -> int:
        """Bytes of host memory: model states of chunks at home there, compute copies, gradients."""
        return sum(c.host_bytes for c in self.chunks) + self.host_gradient_bytes

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the model states of chunks whose home is the host.

        Where the compute copies are no casts, they are the masters.
        """
        at_home = [c for c in self.chunks if c.home is Home.HOST]
        return sum(c.host_bytes for c in at_home) - self.host_copy_bytes

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of compute copies that the host keeps beside masters."""
        return sum(c.cast_bytes for c in self.chunks if c.home is Home.HOST and not c.masters)

    @property
    def host_gradient_bytes(self) -> int:
        """Bytes of host memory for gradients that wait for their update."""
        return gradient_bytes(self._offloaded, self.schedule.gradient_slots)

    @property
    def gradient_slot_bytes(self) -> int | None:
        """Bytes of a host buffer in which gradients wait in turn; None: each has its own."""
        if self.schedule.gradient_slots is None:
            return None
        return gradient_bytes(self._offloaded, 1)

    @property
    def _offloaded(self) -> list[int]:
        offloads = self.actions(Kind.OFFLOAD)
        return [self.chunks[a.chunk].gradient_bytes for a in offloads if a.chunk is not None]

    @property
    def staging_bytes(self) -> int:
        """Bytes of device memory in which masters and gradients are cast; one fetch and one offload
        at a time use them.
        """
        return staging_bytes(self.chunks)

    @property
    def peak_device_bytes(self) -> int:
        """Arena, reserve, device-homed chunks and the largest non-model peak."""
        live = max((m.live_bytes for m in self.moments), default=0)
        fixed = self.schedule.arena_bytes + self.reserved_bytes + self.device_state_bytes
        return fixed + self.staging_bytes + live


def gradient_bytes(sizes: Sequence[int], slots: int | None) -> int:
    """Host bytes for gradients of these sizes: each alone, or in slots of the largest."""
    return sum(sizes) if slots is None else slots * max(sizes, default=0)


def offload_bytes(action: Action, chunk: Chunk) -> int:
    """Bytes that an offload of a chunk's gradient copies to the host."""
    if not chunk.wide:
        return action.nbytes
    if action.offset is not None:
        return sum(slot.nbytes for slot in chunk.masters)
    return action.nbytes * chunk.masters[0].nbytes // chunk.content[0].nbytes


def staging_bytes(chunks: Sequence[Chunk]) -> int:
    """Device bytes for casting the masters and the gradients of any of these chunks."""
    at_home = [c for c in chunks if c.home is Home.HOST]
    return max((c.staged_bytes for c in at_home), default=0) + max(
        (c.casting_bytes for c in at_home), default=0
    )


class PlanError(ValueError):
    """The step cannot fit the budget. Says the moment, the bytes, and what would make it fit."""

    def __init__(
        self,
        message: str,
        *,
        moment: int | None,
        needed_bytes: int,
        available_bytes: int,
        smallest_budget: int | None = None,
    ) -> None:
        super().__init__(message)
        self.moment = moment
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.smallest_budget = smallest_budget


class VerificationError(AssertionError):
    """A plan breaks an invariant: a bug of the passes, never of the user. Lists every problem."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("the plan is not valid:\n" + "\n".join(f"  - {p}" for p in problems))
        self.problems = problems
