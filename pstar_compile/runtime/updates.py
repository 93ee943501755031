"""Updates: the optimizer's step of each chunk, where the chunk's states live.

Each chunk has stock optimizers of its own, one for each param group that has parameters in it. A
chunk on the device is updated on the compute stream; one on the host by a worker thread, behind the
copies of its gradients, while the caller goes on: the chunk's next fetch waits for it, and so does
whoever looks at a master (see ``watched``). Decides nothing: which optimizer, which parameters and
in which order comes from ``ChunkedOptimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from passes.limits import Update
from passes.plan import Home
from pstar_compile.runtime.arriving import OnItsWay, Scale, gradient_of, norm_of
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.runtime.shares import MakeOptimizer, Scratch, Share
from pstar_compile.runtime.store import StoredChunk
from pstar_compile.runtime.watched import touch, watch
from pstar_compile.runtime.worker import Job, Worker
from pstar_compile.torch_compat import has_gradient_hooks

if TYPE_CHECKING:
    from pstar_compile.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class _Work:
    """An update that is due: the gradients of a share's parameters."""

    share: Share
    values: dict[str, Any]
    gradients: list[OnItsWay | Tensor | None]


@dataclass(frozen=True, slots=True)
class Settings:
    """A param group as it was when a step began.

    Attributes:
        index: its position in ``param_groups``.
        parameters: its parameters, in order.
        values: everything else in it.
    """

    index: int
    parameters: tuple[ManagedParameter, ...]
    values: dict[str, Any]


_Part = tuple[Settings, list[ManagedParameter]]
"""The parameters of a group that lie in one chunk."""


class Updates:
    """Runs the updates of one managed model.

    Args:
        engine: the model's.
        make: makes the stock optimizers.
        elementwise: whether they update every element by itself, and the same way.
        groups: the param groups as they are now.
        state: master -> its optimizer state: what the users' optimizer shows.
        state_bytes: bytes that the optimizer keeps for a parameter.
        update: when chunks are updated.
        threads: of the worker for host chunks; None: as many as PyTorch uses anyway.
    """

    def __init__(
        self,
        engine: Engine,
        make: MakeOptimizer,
        groups: Callable[[], list[Settings]],
        state: Callable[[], dict[Any, Any]],
        state_bytes: Callable[[ManagedParameter], int],
        *,
        elementwise: bool,
        update: Update,
        threads: int | None,
    ) -> None:
        self.update_mode = update
        self._elementwise = elementwise
        self._engine = engine
        self._make = make
        self._groups = groups
        self._state = state
        self.state_bytes = state_bytes
        self._threads = threads
        self._worker = Worker("pstar-update")
        self._shares: dict[tuple[StoredChunk | ManagedParameter, int], Share] = {}
        self._scratch = Scratch()
        # Whether gradients' norms are to be taken while they are on the device.
        self.norms = False
        # Parameters that the running backward, or the last one before a step, has updated.
        self.early: set[ManagedParameter] = set()
        self._settings: dict[Any, list[_Part]] = {}

    def begin_backward(self) -> None:
        """A backward that updates begins.

        Raises:
            RuntimeError: if the one before it was not followed by a step.
        """
        if self.early:
            raise RuntimeError(
                "update='backward' has updated the parameters already, and optimizer.step() was "
                "not called since: accumulating gradients over several backward passes, or calling "
                "the model twice for one loss, needs ChunkedOptimizer(..., update='step')"
            )
        self._settings = self._by_chunk(self._groups())

    def update(
        self, chunk: StoredChunk, gradients: Mapping[ManagedParameter, OnItsWay]
    ) -> Job | None:
        """Update one chunk with the gradients of a running backward; returns what the worker was
        given, if anything.
        """
        hooked = [p for p in gradients if has_gradient_hooks(p.master)]
        if hooked:
            raise RuntimeError(
                f"parameter {hooked[0].name!r} has gradient hooks, which update='backward' would "
                f"not run; make the ChunkedOptimizer with update='step'"
            )
        work = []
        for group, parameters in self._settings.get(chunk, ()):
            found: list[OnItsWay | Tensor | None] = [gradients.get(p) for p in parameters]
            work.append(_Work(self._share(chunk, group, tuple(parameters)), group.values, found))
            self.early.update(p for p in parameters if p in gradients)
        return self._update(chunk, work) if work else None

    def step(self) -> None:
        """Update every parameter that has a gradient. Returns before host chunks are updated.

        Raises:
            RuntimeError: if the backward updated one that has a gradient from elsewhere.
        """
        early, self.early = self.early, set()
        for parameter in early:
            if gradient_of(parameter.master) is not None:
                raise parameter.late_gradient()
        for key, shares in self._by_chunk(self._groups()).items():
            work = []
            for group, parameters in shares:
                gradients = [gradient_of(p.master) for p in parameters]
                if any(gradient is not None for gradient in gradients):
                    share = self._share(key, group, tuple(parameters))
                    work.append(_Work(share, group.values, gradients))
            if work:
                self._update(key, work)

    def _by_chunk(self, groups: Sequence[Settings]) -> dict[Any, list[_Part]]:
        """Chunk -> the groups that have a part in it. A parameter without a chunk is its own."""
        by_chunk: dict[Any, list[_Part]] = {}
        # Chunks in the order in which the next forward needs them.
        for chunk in dict.fromkeys(self._engine.chunk_of.values()):
            by_chunk[chunk] = []
        for group in groups:
            for parameter in group.parameters:
                key = self._engine.chunk_of.get(parameter, parameter)
                shares = by_chunk.setdefault(key, [])
                if not shares or shares[-1][0] is not group:
                    shares.append((group, []))
                shares[-1][1].append(parameter)
        return by_chunk

    def clip(
        self,
        parameters: Sequence[ManagedParameter],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """See ``ChunkedOptimizer.clip_grad_norm_``."""
        device = self._engine.config.device
        self.norms = norm_type == 2.0
        found: list[tuple[OnItsWay | Tensor, Tensor]] = []
        for parameter in parameters:
            gradient = gradient_of(parameter.master)
            if gradient is not None:
                norm = _norm(gradient, parameter, norm_type)
                found.append((gradient, norm.to(device, non_blocking=True)))
        if not found:
            return torch.zeros((), device=device)
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm for _, norm in found]), norm_type
        )
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the total norm of order {norm_type} of all gradients is not finite, so it cannot "
                f"be clipped; error_if_nonfinite=False scales by it anyway"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        host = self._engine.pool.lease(factor.nbytes).view(factor.dtype).view(())
        streams = self._engine.streams
        scale = Scale(factor, host, streams.offload([(host, factor)], [streams.mark()]))
        for gradient, _ in found:
            if isinstance(gradient, Tensor):
                gradient.mul_(scale.on(gradient.device))
            else:
                gradient.scale_by(scale)
        return total

    def _share(
        self,
        key: StoredChunk | ManagedParameter,
        group: Settings,
        parameters: tuple[ManagedParameter, ...],
    ) -> Share:
        share = self._shares.get((key, group.index))
        on_host = _on_host(key)
        if share is None or share.parameters != parameters or share.on_host != on_host:
            share = self._shares[key, group.index] = Share(
                parameters,
                self._make,
                group.values,
                on_host=on_host,
                in_pieces=self._elementwise and on_host and not _is_wide(key),
            )
        return share

    def _update(
        self,
        key: StoredChunk | ManagedParameter,
        work: Sequence[_Work],
    ) -> Job | None:
        if not _on_host(key):
            self._run(work, scratch=None, copies={})
            return None
        assert isinstance(key, StoredChunk)
        arrival = self._engine.arrival.get(key)
        masters = [p.master for p in key.parameters]
        touch(masters)
        copies = key.copies
        due = {
            p
            for each in work
            for p, gradient in zip(each.share.parameters, each.gradients, strict=True)
            if gradient is not None
        }

        def update() -> None:
            if arrival is not None:
                # A fetch may still read what is written here.
                arrival.wait_host()
            self._run(work, scratch=self._scratch, copies=copies)
            for parameter, copy in copies.items():
                if parameter not in due:
                    # Nobody has cast it since a user may have written it.
                    copy.copy_(parameter.place())

        job = self._worker.submit(self._with_threads(update))
        key.updating = job
        for master in masters:
            watch(master, job.wait_host)
        return job

    def _with_threads(self, update: Callable[[], None]) -> Callable[[], None]:
        threads, self._threads = self._threads, None

        def first() -> None:
            assert threads is not None
            # With OpenMP the number belongs to the calling thread: the launcher keeps its own.
            torch.set_num_threads(threads)
            update()

        return update if threads is None else first

    def _run(
        self,
        work: Sequence[_Work],
        *,
        scratch: Scratch | None,
        copies: Mapping[ManagedParameter, Tensor],
    ) -> None:
        """Update some shares, on the current thread and stream."""
        state = self._state()
        with torch.no_grad(), torch.inference_mode(False):
            for each in work:
                each.share.run(each.values, each.gradients, state, scratch=scratch, copies=copies)

    def wait(self) -> None:
        """Block until every update is done; raise what one of them raised."""
        touch(p.master for p in self._engine.parameters)

    def move(self, chunk: StoredChunk) -> None:
        """Bring a chunk's optimizer states to where its masters are now."""
        state = self._state()
        for (key, _), share in self._shares.items():
            if key is chunk:
                share.bring(state)

    def close(self) -> None:
        """End the worker."""
        self._worker.drain()
        self._worker.close()


def _norm(gradient: OnItsWay | Tensor, parameter: ManagedParameter, order: float) -> Tensor:
    if isinstance(gradient, OnItsWay):
        first, *others = gradient.contributions
        if not others and gradient.scale is None and order == 2.0:
            if first.norm is not None:
                return first.norm
            if first.event is None:
                return norm_of(first.grad)
        gradient = gradient.total(parameter.master)[0]
    norm: Tensor = torch.linalg.vector_norm(gradient, order)
    return norm


def _is_wide(key: StoredChunk | ManagedParameter) -> bool:
    """Whether gradients come in the masters' dtype, and no compute copies follow."""
    return isinstance(key, StoredChunk) and key.layout.wide


def _on_host(key: StoredChunk | ManagedParameter) -> bool:
    return isinstance(key, StoredChunk) and key.layout.home is Home.HOST
