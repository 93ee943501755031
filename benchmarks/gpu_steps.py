"""Step time, compile time and memory on one CUDA GPU, two configurations side by side.

    python benchmarks/gpu_steps.py fits     # everything resident: ours against whole-graph Inductor
    python benchmarks/gpu_steps.py paged    # an arena of six slots against the resident step
    python benchmarks/gpu_steps.py memory   # predicted against measured peaks
    python benchmarks/gpu_steps.py paged --hidden 1024 --layers 8    # any other size

Forward and backward without optimizer, bf16, checkpointed blocks, batch 8 x 1024. Both
configurations live in one process and take turns; a ratio is the median over turns. Where compile
times are reported, Inductor's caches are off. One JSON line per result.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable
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
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def first_step_seconds(step: Step) -> float:
    """Seconds of the first step: compile time and one execution."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_ms(step: Step, steps: int) -> float:
    """Milliseconds a step, by CUDA events over ``steps`` steps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def compare(name: str, first: Step, second: Step, *, turns: int = 8, steps: int = 4) -> None:
    """Report the ratio of the second step's time to the first's, in alternating turns."""
    for step in (first, second):
        gpu_ms(step, 3)
    pairs = [(gpu_ms(first, steps), gpu_ms(second, steps)) for _ in range(turns)]
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
    report(result="first step, whole-graph Inductor", seconds=first_step_seconds(inductor))
    torch._dynamo.reset()
    model = pstar.manage(build(shape, device="cuda", dtype=torch.bfloat16), device="cuda")
    compiled = torch.compile(model, backend="patrickstar")
    ours = stepper(model, compiled, shape)
    report(result="first step, everything fits", seconds=first_step_seconds(ours))
    compare("everything fits / whole-graph Inductor", inductor, ours)


def paged(shape: Shape) -> None:
    """An arena of six slots, compute copies in pinned host memory, against the resident step."""
    plain = build(shape, device="cuda", dtype=torch.bfloat16)
    inductor = stepper(plain, torch.compile(plain, backend="inductor"), shape)
    report(result="first step, whole-graph Inductor", seconds=first_step_seconds(inductor))
    torch._dynamo.reset()
    peak = peak_of(inductor)
    report(result="peak, whole-graph Inductor", gib=peak / 2**30)
    # Six slots; the token and position embeddings make the largest chunk.
    embeddings = 2 * shape.hidden * (shape.vocabulary + shape.sequence)
    arena = 6 * max(block_bytes(shape, torch.bfloat16) + 4096, embeddings + 4096)
    for trust in (True, False):
        model = build(shape, device="cuda", dtype=torch.bfloat16)
        start = time.perf_counter()
        pstar.manage(model, device="cuda", arena_memory=arena)
        compiled = torch.compile(
            model, backend="patrickstar", options={"trust_version_counters": trust}
        )
        ours = stepper(model, compiled, shape)
        report(
            result="first step, paged",
            seconds=first_step_seconds(ours),
            with_manage_seconds=time.perf_counter() - start,
        )
        plan = pstar.last_plan(compiled)
        name = f"paged (trust_version_counters={trust}) / resident Inductor"
        compare(name, inductor, ours)
        stats = pstar.stats(model)
        report(
            result=f"traffic, trust_version_counters={trust}",
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
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


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
        Shape(hidden=1024, layers=24, heads=16),
        Shape(hidden=2048, layers=24, heads=16),
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
            arena = None if blocks is None else max(blocks * block, 2 * head)
            model = pstar.manage(
                build(shape, device="cpu", dtype=torch.bfloat16), device="cuda", arena_memory=arena
            )
            compiled = torch.compile(model, backend="patrickstar")
            step = stepper(model, compiled, shape)
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            first = torch.cuda.max_memory_allocated() - before
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
                first_step_gib=first / 2**30,
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
    parser.add_argument("case", choices=("fits", "paged", "memory"))
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch._inductor.config.force_disable_caches = arguments.case != "memory"
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
    (fits if arguments.case == "fits" else paged)(shape)


if __name__ == "__main__":
    main()
