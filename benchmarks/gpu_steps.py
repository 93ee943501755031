"""Step time, compile time and memory on one CUDA GPU, two configurations side by side.

    python benchmarks/gpu_steps.py fits     # everything resident: ours against whole-graph Inductor
    python benchmarks/gpu_steps.py paged    # an arena of six slots against the resident step
    python benchmarks/gpu_steps.py memory   # predicted against measured peaks
    python benchmarks/gpu_steps.py compile  # seconds of the first step, a fresh process for each
    python benchmarks/gpu_steps.py paged --hidden 1024 --layers 8    # any other size

Forward and backward without optimizer, bf16, checkpointed blocks, batch 8 x 1024; the gradients
are dropped unread (``p.grad = None``). Two configurations that are compared live in one process and
take turns; a ratio is the median over turns. Where compile times are reported, Inductor's caches
start empty. One JSON line per result.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpt import GPT, Shape, block_bytes, build
from torch import Tensor

import pstar_compile as pstar

BATCH = 8
Step = Callable[[], Tensor]


def report(**values: Any) -> None:
    """Print one result."""
    print(json.dumps(values), flush=True)


def data(shape: Shape) -> tuple[Tensor, Tensor]:
    """One fixed batch of random tokens."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    size = (BATCH, shape.sequence + 1)
    tokens = torch.randint(0, shape.vocabulary, size, device="cuda", generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stepper(model: GPT, compiled: Callable[..., Tensor], shape: Shape) -> Step:
    """A function that runs one forward and backward and returns the loss."""
    inputs, targets = data(shape)

    def step() -> Tensor:
        loss = compiled(inputs, targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return step


def first_step_seconds(step: Step) -> float:
    """Seconds of the first step: compile time and one execution."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_ms(step: Step, steps: int) -> float:
    """Milliseconds a step over ``steps`` steps, all copies of the last one included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1000


def compare(name: str, first: Step, second: Step, *, turns: int = 6, steps: int = 8) -> None:
    """Report the ratio of the second step's time to the first's, in alternating turns."""
    for step in (first, second):
        step_ms(step, 3)
    pairs = [(step_ms(first, steps), step_ms(second, steps)) for _ in range(turns)]
    ratios = [b / a for a, b in pairs]
    losses = [[step().item() for _ in range(3)] for step in (first, second)]
    report(
        result=name,
        first_ms=statistics.median(a for a, _ in pairs),
        second_ms=statistics.median(b for _, b in pairs),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        losses_equal=losses[0] == losses[1],
        losses=losses,
    )


def fits(shape: Shape) -> None:
    """Everything resident: ours against whole-graph Inductor."""
    plain = build(shape, device="cuda", dtype=torch.bfloat16)
    inductor = stepper(plain, torch.compile(plain, backend="inductor"), shape)
    model = pstar.manage(build(shape, device="cuda", dtype=torch.bfloat16), device="cuda")
    compiled = torch.compile(model, backend="patrickstar")
    ours = stepper(model, compiled, shape)
    compare("everything fits / whole-graph Inductor", inductor, ours)


def paged(shape: Shape) -> None:
    """An arena of six blocks, compute copies in pinned host memory, against the resident step."""
    plain = build(shape, device="cuda", dtype=torch.bfloat16)
    inductor = stepper(plain, torch.compile(plain, backend="inductor"), shape)
    inductor()
    report(result="peak, whole-graph Inductor", gib=peak_of(inductor) / 2**30)
    held = torch.cuda.memory_allocated()
    for name, arena, trust in (
        ("six slots", arena_bytes(shape, slots=6), True),
        ("eight slots", arena_bytes(shape, slots=8), True),
        ("six slots", arena_bytes(shape, slots=6), False),
    ):
        model = build(shape, device="cuda", dtype=torch.bfloat16)
        pstar.manage(model, device="cuda", arena_memory=arena)
        compiled = torch.compile(
            model, backend="patrickstar", options={"trust_version_counters": trust}
        )
        ours = stepper(model, compiled, shape)
        ours()
        report(result="peak, paged, beside the plain model", gib=(peak_of(ours) - held) / 2**30)
        plan = pstar.last_plan(compiled)
        name = f"paged: {name}, trust_version_counters={trust}"
        compare(f"{name} / resident Inductor", inductor, ours)
        stats = pstar.stats(model)
        report(
            result=f"traffic, {name}",
            planned_h2d=plan.h2d_bytes,
            carried=plan.carried_bytes,
            executed_h2d=stats.h2d_bytes,
            executed_carried=stats.carried_bytes,
            planned_d2h=plan.d2h_bytes,
            executed_d2h=stats.d2h_bytes,
            on_demand=stats.on_demand_fetches,
            wait_s=stats.wait_s,
            chunks=len(plan.chunks),
            arena=plan.arena_bytes,
            arena_peak=stats.arena_peak_bytes,
            predicted_step_s=plan.step_seconds,
        )
        pstar.unmanage(model)
        del model, compiled, ours, plan
        gc.collect()
        torch.cuda.empty_cache()


def arena_bytes(shape: Shape, *, slots: int) -> int:
    """Bytes of an arena of so many largest chunks: a block, or tokens and positions together."""
    embeddings = 2 * shape.hidden * (shape.vocabulary + shape.sequence)
    return slots * (max(block_bytes(shape, torch.bfloat16), embeddings) + 4096)


def first(shape: Shape, name: str) -> None:
    """Seconds of the first step of one configuration, in this process."""
    arena = arena_bytes(shape, slots=6) if name == "paged" else None
    model = build(shape, device="cuda", dtype=torch.bfloat16)
    if name != "inductor":
        pstar.manage(model, device="cuda", arena_memory=arena)
    compiled = torch.compile(model, backend="inductor" if name == "inductor" else "patrickstar")
    step = stepper(model, compiled, shape)
    seconds = first_step_seconds(step)
    report(
        result="first step",
        configuration=name,
        hidden=shape.hidden,
        layers=shape.layers,
        seconds=seconds,
        later_step_s=step_ms(step, 3) / 1000,
        phases={
            phase: round(sum(times), 1)
            for phase, times in torch._dynamo.utils.compilation_time_metrics.items()
            if sum(times) > 0.5
        },
    )


def compile_times(cases: Sequence[tuple[int, int, str]]) -> None:
    """First steps, each in a fresh process with empty caches."""
    for hidden, layers, name in cases:
        with tempfile.TemporaryDirectory() as caches:
            subprocess.run(
                [
                    *(sys.executable, __file__, "first", "--configuration", name),
                    *("--hidden", str(hidden), "--layers", str(layers)),
                ],
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": caches,
                    "TRITON_CACHE_DIR": f"{caches}/triton",
                },
                check=True,
            )


def peak_of(step: Step) -> int:
    """Peak allocated bytes of one step, with what is allocated anyway."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def memory() -> None:
    """Predicted against measured peak of device memory, three models and three budgets each."""
    shapes = (
        Shape(hidden=1024, layers=12, heads=16),
        Shape(hidden=2048, layers=12, heads=16),
        Shape(hidden=1536, layers=12, heads=12, checkpointed=False),
    )
    for shape in shapes:
        block = block_bytes(shape, torch.bfloat16) + 4096
        head = shape.vocabulary * shape.hidden * 2
        for blocks in (4, 8, None):
            started = time.perf_counter()
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            arena = None if blocks is None else blocks * block + 2 * head
            model = pstar.manage(
                build(shape, device="cuda", dtype=torch.bfloat16), device="cuda", arena_memory=arena
            )
            compiled = torch.compile(model, backend="patrickstar")
            step = stepper(model, compiled, shape)
            step()
            peak = peak_of(step) - before
            plan = pstar.last_plan(compiled)
            report(
                result="peak",
                hidden=shape.hidden,
                layers=shape.layers,
                checkpointed=shape.checkpointed,
                arena_gib=plan.arena_bytes / 2**30,
                predicted_gib=plan.peak_device_bytes / 2**30,
                measured_gib=peak / 2**30,
                predicted_over_measured=plan.peak_device_bytes / peak,
                predicted_live_gib=max(m.live_bytes for m in plan.moments) / 2**30,
                at_moment=max(plan.moments, key=lambda m: m.live_bytes).index,
                moments=len(plan.moments),
                seconds=time.perf_counter() - started,
            )
            pstar.unmanage(model)
            del model, compiled, step, plan
            torch._dynamo.reset()


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("fits", "paged", "memory", "compile", "first"))
    parser.add_argument(
        "--configuration", choices=("inductor", "fits", "paged"), default="inductor"
    )
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.case == "first":
        for name in ("pstar_compile", "passes"):
            logging.getLogger(name).setLevel(logging.DEBUG)
    if arguments.case == "compile":
        compile_times(
            [(2048, 24, name) for name in ("inductor", "fits")]
            + [(4096, 20, name) for name in ("inductor", "paged")]
        )
        return
    torch.set_float32_matmul_precision("high")
    report(
        case=arguments.case,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name(),
    )
    if arguments.case == "memory":
        memory()
        return
    hidden, layers = (2048, 24) if arguments.case == "fits" else (4096, 20)
    hidden, layers = arguments.hidden or hidden, arguments.layers or layers
    shape = Shape(hidden=hidden, layers=layers, heads=hidden // 128)
    if arguments.case == "first":
        first(shape, arguments.configuration)
        return
    (fits if arguments.case == "fits" else paged)(shape)


if __name__ == "__main__":
    main()
