"""``pstar demo``: manage, compile, train, and compare what was planned with what happened."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

import pstar_compile as pstar
from passes.plan import Kind, StepPlan
from pstar_compile.config import Inner, format_bytes
from pstar_compile.demo.corpus import load_corpus
from pstar_compile.demo.model import GPT, GPTConfig
from pstar_compile.demo.train import TrainConfig, Trainer
from pstar_compile.runtime.stats import Stats


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What ``pstar demo`` was asked for."""

    steps: int = 80
    """Optimizer steps in all."""
    device: str | None = None
    """"cpu" or "cuda"; None: cuda if there is one."""
    device_memory: int | str | None = None
    """Budget for chunks and activations together; None: the arena alone is limited, to a quarter
    of the compute copies."""
    batch: int = 4
    """Sequences in a step."""
    sequence: int = 128
    """Bytes in a sequence."""
    seed: int = 0
    """For weights and data."""
    checkpoint: Path = Path("checkpoints")
    """The folder of the latest checkpoint."""
    resume: bool = False
    """Go on from that checkpoint."""
    inner: Inner = "inductor"
    """What compiles the segments."""


def run_demo(config: DemoConfig, *, shape: GPTConfig | None = None) -> None:
    """Train, and print the losses and the planned against the executed step.

    Args:
        config: see :class:`DemoConfig`.
        shape: the model's shape; its context becomes the sequence. Default: 25 M parameters.

    Raises:
        ValueError: for settings that cannot work, and tqdm missing.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ValueError(
            "the demo needs tqdm: python -m pip install 'pstar-compile[demo]'"
        ) from error

    device = _device(config.device)
    inner = _inner(config.inner, device)
    settings = TrainConfig(
        steps=config.steps, batch=config.batch, sequence=config.sequence, seed=config.seed
    )
    corpus = load_corpus()
    print(
        f"text: {corpus.files} files of Python's standard library, "
        f"{len(corpus.train)} bytes to train on, {len(corpus.validation)} to validate on"
    )

    torch.manual_seed(config.seed)
    model = GPT(replace(shape or GPTConfig(), context=config.sequence))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parameters = sum(p.numel() for p in model.parameters())
    needed = parameters * dtype.itemsize
    arena = None if config.device_memory is not None else needed // 4
    limit = f"the arena has {format_bytes(arena)}" if arena else f"{config.device_memory} in all"
    print(
        f"model: {parameters} parameters on {device}; their {dtype} compute copies need "
        f"{format_bytes(needed)}, {limit}"
    )
    pstar.manage(
        model,
        device=device,
        device_memory=config.device_memory,
        arena_memory=arena,
        param_dtype=dtype,
    )
    compiled = torch.compile(model, backend="patrickstar", options={"inner": inner})
    trainer = Trainer(model, compiled, corpus, settings, device=device)
    path = config.checkpoint / "demo.pt"
    if config.resume:
        trainer.load(path)
        print(f"resumed after step {trainer.step} from {path}")

    print("the first step compiles and takes longer")
    with tqdm(total=config.steps, initial=trainer.step, unit="step") as bar:
        while trainer.step < config.steps:
            started = time.perf_counter()
            loss = trainer.train_step()
            tokens = config.batch * config.sequence / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens:.0f} tokens/s", refresh=False)
            bar.update()
            if trainer.step == config.steps:
                # Validation has a plan and figures of its own.
                table = step_table(pstar.last_plan(model).step, pstar.stats(model))
            if trainer.step % settings.every == 0 or trainer.step == config.steps:
                bar.write(
                    f"step {trainer.step}: loss {loss:.3f}, validation {trainer.validate():.3f}",
                    file=sys.stdout,
                )
                trainer.save(path)
    print(f"checkpoint: {path}\n\nthe last training step:\n{table}")


def step_table(plan: StepPlan, stats: Stats) -> str:
    """What the plan said of a step beside what the step did."""
    fetches = sum(1 for _ in plan.actions(Kind.FETCH))
    rows = [
        ("host to device", format_bytes(plan.h2d_bytes), format_bytes(stats.h2d_bytes)),
        ("device to host", format_bytes(plan.d2h_bytes), format_bytes(stats.d2h_bytes)),
        ("fetches", fetches, stats.fetches),
        ("fetches on demand", 0, stats.on_demand_fetches),
        (
            "arena peak",
            format_bytes(plan.schedule.arena_bytes),
            format_bytes(stats.arena_peak_bytes),
        ),
        ("waiting for copies", f"{plan.wait_seconds:.4f} s", f"{stats.wait_s:.4f} s"),
    ]
    return tabulate(
        rows,
        headers=["", "planned", "executed"],
        colalign=("left", "right", "right"),
        disable_numparse=True,
    )


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for and torch sees none; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _inner(inner: Inner, device: torch.device) -> Inner:
    if inner == "eager" or device.type == "cuda":
        return inner
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return inner
    print(f"no C++ compiler ({compiler}) for Inductor: segments run with inner='eager'")
    return "eager"
