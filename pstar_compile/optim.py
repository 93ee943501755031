"""``ChunkedOptimizer``: a stock optimizer's step for each chunk, at the chunk's home."""

from __future__ import annotations

import copy
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from passes.limits import Update
from pstar_compile.managed import engine_of
from pstar_compile.runtime.parameter import ManagedParameter, masters
from pstar_compile.runtime.updates import Settings, Updates

_LAUNCHER_CORES = 2
"""Cores left to the thread that launches kernels while updates run on the host."""

_IMPLEMENTATIONS = ("fused", "foreach")
"""Settings that choose how a step is computed, not what."""

_ELEMENTWISE = frozenset(
    {
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
        *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop),
    }
)
"""Classes that update every element by itself, so that a part of a parameter may be updated alone.
Not their subclasses, which may do anything."""


class ChunkedOptimizer(torch.optim.Optimizer):
    """Runs a stock ``torch.optim`` class over the model states of a managed model, chunk by chunk.

    Each chunk is updated where its states live: on the device, or on the host by worker threads
    while the caller goes on. ``step()`` returns before host updates are done; a chunk's next fetch
    waits for its own update, and whoever looks at a master, a state, or ``state_dict()`` waits for
    it, too. The results are those of the class itself: each parameter is updated by the class's own
    step, with its own states, in the standard format.

    Args:
        model: a managed model, or a compiled version of one.
        optimizer_class: a ``torch.optim.Optimizer`` that updates every parameter by itself: Adam,
            AdamW, SGD, Adagrad, RMSprop, Adafactor, Muon, or one of your own.
        params: parameters or param groups as for ``optimizer_class``; default: all of the model's.
        update: "step": ``step()`` updates. "backward": each chunk is updated inside the backward,
            as soon as its gradient is complete and nothing reads it any more, so that gradients
            are never stored; ``step()`` then ends the step. Gradients cannot be accumulated,
            clipped, or looked at.
        kwargs: the class's settings. ``fused=True`` is added where the class offers it and neither
            ``fused`` nor ``foreach`` nor ``differentiable`` is given.

    Raises:
        ValueError: for a model that is not managed or has a ChunkedOptimizer already, parameters
            that are not the model's, or a class that cannot work chunk by chunk, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        params: Iterable[Any] | None = None,
        update: Update = "step",
        **kwargs: Any,
    ) -> None:
        engine = engine_of(model)
        _check_class(optimizer_class)
        if engine.updates is not None:
            raise ValueError(
                "this model has a ChunkedOptimizer already; call its close() before making another"
            )
        signature = inspect.signature(optimizer_class).parameters
        chosen = any(kwargs.get(k) is not None for k in (*_IMPLEMENTATIONS, "differentiable"))
        if "fused" in signature and not chosen and _can_fuse(engine.parameters):
            kwargs["fused"] = True
        if update not in get_args(Update):
            raise ValueError(f"update must be one of {', '.join(get_args(Update))}, got {update!r}")
        self._update = update
        self._optimizer_class = optimizer_class
        self._kwargs = kwargs
        self._engine = engine
        self._states: defaultdict[Tensor, Any] = defaultdict(dict)
        self._ratios: dict[int, float] = {}
        sample = optimizer_class([nn.Parameter(torch.zeros(1, 1))], **kwargs)
        super().__init__(model.parameters() if params is None else params, sample.defaults)
        self._measure_states()
        on_gpu = engine.config.device.type == "cuda"
        engine.updates = self._updates = Updates(
            engine,
            self._make,
            self._settings,
            lambda: self._states,
            self._state_bytes,
            elementwise=optimizer_class in _ELEMENTWISE,
            update=update,
            threads=max(1, (os.cpu_count() or 1) - _LAUNCHER_CORES) if on_gpu else None,
        )
        engine.replan()

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Master -> its states, as the stock class keeps them; waits for updates under way."""
        if "_updates" in self.__dict__:
            self._updates.wait()
        return self._states

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._states = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What ``load_state_dict`` ends with."""
        self.state = state.pop("state")
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of parameters of the managed model that are in no group yet.

        Raises:
            ValueError: for other parameters.
        """
        super().add_param_group(param_group)
        foreign = [p for p in self.param_groups[-1]["params"] if self._managed(p) is None]
        if foreign:
            del self.param_groups[-1]
            shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
            raise ValueError(
                f"{len(foreign)} parameters (of shapes {shapes}{', ...' if foreign[3:] else ''}) "
                f"are not parameters of the managed model; give a ChunkedOptimizer "
                f"model.parameters(), and others a stock optimizer"
            )
        if "_updates" in self.__dict__:
            self._measure_states()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss, as for stock optimizers.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._updates.step()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients together so that their norm is at most ``max_norm``.

        As :func:`torch.nn.utils.clip_grad_norm_`, but norms are taken where gradients are: those
        that leave for the host have theirs taken on the device, from the second call on.

        Args:
            max_norm: the largest norm.
            norm_type: which norm; only 2-norms are taken on the device.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before, a scalar on the compute device.

        Raises:
            RuntimeError: if ``error_if_nonfinite``, or with ``update="backward"``, which has no
                gradients left to clip.
        """
        if self._update == "backward":
            raise RuntimeError(
                "clip_grad_norm_ needs the norm of all gradients before the first update; make the "
                "ChunkedOptimizer with update='step'"
            )
        return self._updates.clip(
            [p for group in self.param_groups for p in self._members(group)],
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that are still on their way, without waiting for them."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """As the stock class gives it, and loadable by it."""
        self._updates.wait()
        packed = super().state_dict()
        # In the order of the parameters, as if one optimizer had updated them all.
        packed["state"] = dict(sorted(packed["state"].items()))
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or the stock class gave; how a step is computed stays as it is."""
        self._updates.wait()
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=False):
            group.update({k: own[k] for k in _IMPLEMENTATIONS if k in own})
        super().load_state_dict({**state_dict, "param_groups": groups})

    def close(self) -> None:
        """Wait for updates under way, and leave the model to other optimizers."""
        self._updates.wait()
        self._updates.close()
        if self._engine.updates is self._updates:
            self._engine.updates = None
            self._engine.replan()

    def _managed(self, master: Tensor) -> ManagedParameter | None:
        reference = masters.get(master)
        found: ManagedParameter | None = None if reference is None else reference()
        return found if found is not None and found.engine is self._engine else None

    def _settings(self) -> list[Settings]:
        return [
            Settings(
                index,
                tuple(self._members(group)),
                {k: _frozen(v) for k, v in group.items() if k not in ("params", "param_names")},
            )
            for index, group in enumerate(self.param_groups)
        ]

    def _members(self, group: dict[str, Any]) -> list[ManagedParameter]:
        found = [self._managed(p) for p in group["params"]]
        if None in found:
            raise RuntimeError(
                "the model of this ChunkedOptimizer is no longer managed; make a stock optimizer"
            )
        return cast(list[ManagedParameter], found)

    def _make(self, leaves: list[nn.Parameter], values: dict[str, Any]) -> torch.optim.Optimizer:
        optimizer = self._optimizer_class([{**values, "params": leaves}], **self._kwargs)
        if len(optimizer.param_groups) != 1:
            raise ValueError(f"{self._optimizer_class.__name__} makes param groups of its own")
        return optimizer

    def _state_bytes(self, parameter: ManagedParameter) -> int:
        """Bytes that the class keeps for a parameter, by what it keeps for a small one."""
        master = parameter.master
        if not master.requires_grad or not any(
            p is master for g in self.param_groups for p in g["params"]
        ):
            return 0
        return int(self._ratios[master.dim()] * master.nbytes)

    def _measure_states(self) -> None:
        """Learn how much the class keeps by what it keeps for small parameters. Not when a plan
        asks for it: inside a compilation, tensors are fake ones.
        """
        for dimensions in {p.master.dim() for p in self._engine.parameters}:
            sample = nn.Parameter(torch.zeros((8,) * dimensions))
            sample.grad = torch.zeros_like(sample)
            # Every group may have its own momentum: the largest counts.
            ratio = 0.0
            for group in self.param_groups:
                if all(p.dim() != dimensions for p in group["params"]):
                    # The class may take only some (Muon takes matrices).
                    continue
                values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                optimizer = self._make([sample], values)
                with torch.no_grad():
                    optimizer.step()
                kept = sum(
                    v.nbytes
                    for v in optimizer.state[sample].values()
                    if isinstance(v, Tensor) and v.dim()
                )
                ratio = max(ratio, kept / sample.nbytes)
            self._ratios[dimensions] = ratio


def _check_class(optimizer_class: type[torch.optim.Optimizer]) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise ValueError(
            f"optimizer_class must be a class such as torch.optim.AdamW, got {optimizer_class!r}"
        )
    if issubclass(optimizer_class, ChunkedOptimizer):
        raise ValueError("optimizer_class must be a stock optimizer, not ChunkedOptimizer itself")
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS searches along one direction for all parameters together, so it cannot update "
            "chunk by chunk; use it on model.parameters() directly"
        )


def _can_fuse(parameters: Iterable[ManagedParameter]) -> bool:
    return all(p.master.dtype.is_floating_point for p in parameters)


def _frozen(value: Any) -> Any:
    """A setting that later changes by schedulers do not reach."""
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
