"""Whole training steps on one CUDA GPU: AdamW on fp32 masters, bf16 compute, checkpointed blocks.

    python benchmarks/train.py 7b                       # the whole GPU, the update in the backward
    python benchmarks/train.py 7b --device-memory 40GiB --update step
    python benchmarks/train.py 13b 20b                  # a fresh process for each
    python benchmarks/train.py 7b --trainer plain       # autocast, fused AdamW, blocks compiled

Batch 8 x 1024, vocabulary 50304, the GPT of ``gpt.py``. One JSON line per model: tokens a second by
the median of the last steps, measured and predicted step time and memory, and the losses.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import Shape, build
from torch import Tensor

import pstar_compile as pstar
from passes.plan import Home

BATCH = 8
MODELS = {
    "1b": Shape(hidden=2048, layers=24, heads=16),
    "4b": Shape(hidden=3072, layers=32, heads=24),
    "7b": Shape(hidden=4096, layers=32, heads=32),
    "10b": Shape(hidden=4096, layers=48, heads=32),
    "13b": Shape(hidden=5120, layers=40, heads=40),
    "20b": Shape(hidden=6144, layers=43, heads=48),
    "21b": Shape(hidden=6144, layers=45, heads=48),
}


def host_gib(field: str = "VmRSS") -> float:
    """Host memory of this process."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) / 2**20
    raise RuntimeError(f"no {field} in /proc/self/status")


def batches(shape: Shape) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Random tokens of each step, the same for every trainer; a few batches take turns."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    tokens = torch.randint(
        0, shape.vocabulary, (4, BATCH, shape.sequence + 1), device="cuda", generator=generator
    )
    return lambda step: (
        tokens[step % 4, :, :-1].contiguous(),
        tokens[step % 4, :, 1:].contiguous(),
    )


def record(path: str | None, step: Callable[[], Tensor]) -> float:
    """Profile two steps in a row, kernels and copies by stream, as a trace for Perfetto; returns
    the seconds of one step in which kernels ran.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        step()
        torch.cuda.synchronize()
    if path is not None:
        profile.export_chrome_trace(path)
    kernels = [
        event.device_time_total
        for event in profile.events()
        if event.device_type is torch.autograd.DeviceType.CUDA
        and not event.name.startswith("Memcpy")
        and not event.is_user_annotation
    ]
    return sum(kernels) / 2e6


def bounds(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: pstar.Plan
) -> dict[str, float]:
    """Seconds that a step's copies and host updates take by themselves.

    The updates are measured on a few chunks, with gradients that need no cast, and scaled.
    """
    parameters = dict(model.named_parameters())
    chunks = [c for c in plan.chunks if c.home is Home.HOST]
    if not chunks:
        return {"h2d_alone_s": 0.0, "d2h_alone_s": 0.0, "update_alone_s": 0.0}
    size = max(c.nbytes for c in chunks)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    seconds = {}
    for name, target, source, nbytes in (
        ("h2d_alone_s", device, host, plan.h2d_bytes),
        ("d2h_alone_s", host, device, plan.d2h_bytes),
    ):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds[name] = (time.perf_counter() - start) * nbytes / (8 * size)
    del host, device
    few = chunks[:: max(1, len(chunks) // 4)][:4]
    members = [parameters[plan.step.parameters[s.parameter].name] for c in few for s in c.content]
    times = []
    for _ in range(3):
        for parameter in members:
            parameter.grad = torch.zeros_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        for parameter in members:
            parameter.view(-1)[:1].tolist()  # waits for the update
        times.append(time.perf_counter() - start)
        optimizer.zero_grad()
    total = sum(c.elements for c in chunks)
    seconds["update_alone_s"] = min(times) * total / sum(p.numel() for p in members)
    return seconds


def train(name: str, arguments: argparse.Namespace) -> None:
    """Train one model and print what was seen."""
    shape = MODELS[name]
    before = host_gib()
    model = build(shape, device="cuda", dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    if arguments.trainer == "plain":
        for block in model.blocks:
            block.compile()
        run: Callable[..., Tensor] = torch.autocast("cuda", torch.bfloat16)(model)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=True
        )
    else:
        pstar.manage(
            model,
            device="cuda",
            device_memory=arguments.device_memory,
            param_dtype=torch.bfloat16,
        )
        run = torch.compile(model, backend="patrickstar")
        optimizer = pstar.ChunkedOptimizer(
            model, torch.optim.AdamW, lr=1e-4, update=arguments.update
        )
    batch = batches(shape)
    losses: list[Tensor] = []
    seconds: list[float] = []
    resident: list[float] = []

    def step_once(step: int) -> Tensor:
        loss = run(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Reading the loss of each step, as loops do that print it.
        loss.item()
        return loss.detach()

    torch.cuda.synchronize()
    for step in range(arguments.steps):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step_once(step))
        seconds.append(time.perf_counter() - start)
        resident.append(round(host_gib() - before, 2))
    torch.cuda.synchronize()
    total = time.perf_counter() - start - seconds[-1]
    # A step ends when the next one may begin: steps are timed in a row, not one by one.
    step_s = statistics.median(seconds[2:])
    result: dict[str, Any] = {
        "model": name,
        "trainer": arguments.trainer,
        "update": arguments.update,
        "device_memory": arguments.device_memory,
        "parameters": parameters,
        "tokens_per_s": round(BATCH * shape.sequence / step_s),
        "step_s": round(step_s, 4),
        "steps_s": [round(s, 3) for s in seconds],
        "tail_s": round(total, 3),
        "peak_device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "host_gib": resident[-1],
        "host_gib_by_step": resident,
        "losses": [round(value.item(), 4) for value in losses],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if arguments.trainer == "ours":
        plan = pstar.last_plan(run)
        stats = pstar.stats(model)
        result |= {
            "predicted_step_s": round(plan.step_seconds, 4),
            "predicted_peak_gib": round(plan.peak_device_bytes / 2**30, 2),
            "predicted_host_gib": round(plan.peak_host_bytes / 2**30, 2),
            "chunks": len(plan.chunks),
            "on_device": sum(c.home is Home.DEVICE for c in plan.chunks),
            "arena_gib": round(plan.arena_bytes / 2**30, 2),
            "h2d_gb": round(stats.h2d_bytes / 1e9, 2),
            "d2h_gb": round(stats.d2h_bytes / 1e9, 2),
            "planned_h2d_gb": round(plan.h2d_bytes / 1e9, 2),
            "planned_d2h_gb": round(plan.d2h_bytes / 1e9, 2),
            "wait_s": round(stats.wait_s, 4),
        }
    print(json.dumps(result), flush=True)
    if arguments.bounds:
        path = f"{arguments.trace}.{name}.json.gz" if arguments.trace else None
        alone = {"compute_alone_s": record(path, lambda: step_once(arguments.steps))}
        if arguments.trainer == "ours":
            alone |= bounds(model, optimizer, plan)
        print(json.dumps({"model": name, **{k: round(v, 4) for k, v in alone.items()}}), flush=True)


def main() -> None:
    """Train each model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--trainer", choices=("ours", "plain"), default="ours")
    parser.add_argument("--update", choices=("step", "backward"), default="backward")
    parser.add_argument("--device-memory")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bounds", action="store_true", help="time the parts of a step alone")
    parser.add_argument("--trace", help="with --bounds: write a trace to TRACE.MODEL.json.gz")
    parser.add_argument("--here", action="store_true", help="in this process")
    arguments = parser.parse_args()
    if arguments.here:
        logging.basicConfig(level=logging.WARNING)
        torch.set_float32_matmul_precision("high")
        for name in arguments.models:
            train(name, arguments)
        return
    options = [a for a in sys.argv[1:] if a not in arguments.models]
    for name in arguments.models:
        subprocess.run(
            [sys.executable, __file__, name, *options, "--here"],
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            check=False,
        )


if __name__ == "__main__":
    main()
