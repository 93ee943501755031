"""The training loop of the demo: plain PyTorch that does not know how its model is compiled."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pstar_compile.demo.corpus import Corpus, sample_batch

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = 80
    """Optimizer steps in all; the learning rate has decayed at the last one."""
    batch: int = 4
    """Sequences in a step."""
    sequence: int = 128
    """Tokens in a sequence."""
    learning_rate: float = 6e-4
    """The highest learning rate, reached after the warm-up."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises from near zero."""
    weight_decay: float = 0.1
    """AdamW's."""
    clip_norm: float = 1.0
    """The largest norm of all gradients together."""
    validation_batches: int = 8
    """Batches in one validation; always the same ones."""
    every: int = 40
    """Steps from one validation and checkpoint to the next."""
    seed: int = 0
    """For the order of the data."""


class Trainer:
    """One training run: what it owns is what a checkpoint holds.

    Args:
        model: owns the parameters.
        compiled: what is called, ``compiled(x, y) -> loss``: the model, compiled or not.
        corpus: the text.
        config: see :class:`TrainConfig`.
        device: where ``compiled`` wants its inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: LossFunction,
        corpus: Corpus,
        config: TrainConfig,
        *,
        device: torch.device,
    ) -> None:
        self.model = model
        self.compiled = compiled
        self.corpus = corpus
        self.config = config
        self.device = device
        self.step = 0
        self.generator = torch.Generator().manual_seed(config.seed)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
        )

    def train_step(self) -> float:
        """Do one optimizer step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        self.model.train()
        x, y = self._batch(self.corpus.train, self.generator)
        loss = self.compiled(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over the validation batches."""
        self.model.eval()
        generator = torch.Generator().manual_seed(self.config.seed)
        losses = [
            self.compiled(*self._batch(self.corpus.validation, generator)).item()
            for _ in range(self.config.validation_batches)
        ]
        return sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash while writing leaves the previous one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "generator": self.generator.get_state(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
            "config": asdict(self.config),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Go on where :meth:`save` left off.

        Raises:
            ValueError: if there is no checkpoint, if it was made with other settings (the number
                of steps aside), or if all its steps are done.
        """
        if not path.is_file():
            raise ValueError(f"there is no checkpoint to resume from at {path}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        problems = [
            f"{name} was {state['config'].get(name)} and is {value}"
            for name, value in asdict(self.config).items()
            if name != "steps" and state["config"].get(name) != value
        ]
        if problems:
            raise ValueError(
                f"the checkpoint at {path} was made with other settings: {', '.join(problems)}; "
                f"give the same ones, or start anew without resuming"
            )
        if state["step"] >= self.config.steps:
            raise ValueError(
                f"the checkpoint at {path} has done {state['step']} steps already, and "
                f"{self.config.steps} were asked for; ask for more, or start anew without resuming"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_rng"])
        if len(state["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def _batch(self, text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = sample_batch(
            text, batch=self.config.batch, sequence=self.config.sequence, generator=generator
        )
        return x.to(self.device), y.to(self.device)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth of the highest rate."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))
