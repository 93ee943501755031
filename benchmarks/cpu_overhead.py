"""Overhead on a CPU where everything fits: a step of the demo's model against Inductor's.

    python benchmarks/cpu_overhead.py

Forward and backward, fp32, batch 4 x 128. Both models live in one process and take turns; the
ratio is the median over turns. One JSON line.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable

import torch

import pstar_compile as pstar
from pstar_compile.demo.model import GPT, GPTConfig

TURNS = 12
STEPS = 2


def main() -> None:
    """Measure both and print the ratio."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig())
    managed = pstar.manage(copy.deepcopy(plain), device="cpu")
    tokens = torch.randint(0, 256, (4, 129))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def stepper(model: GPT, backend: str) -> Callable[[], float]:
        compiled = torch.compile(model, backend=backend)

        def seconds() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                compiled(inputs, targets).backward()
                model.zero_grad(set_to_none=True)
            return time.perf_counter() - start

        seconds()
        return seconds

    inductor = stepper(plain, "inductor")
    ours = stepper(managed, "patrickstar")
    pairs = [(inductor(), ours()) for _ in range(TURNS)]
    ratios = [b / a for a, b in pairs]
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "inductor_s": round(statistics.median(a for a, _ in pairs) / STEPS, 4),
                "patrickstar_s": round(statistics.median(b for _, b in pairs) / STEPS, 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
