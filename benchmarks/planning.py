"""Time of planning for decoders of 12, 24, 48 and 96 layers, 175 B parameters at most.

    python benchmarks/planning.py

Everything happens on meta tensors on a CPU: trace, partition, all passes, verify; no segment is
compiled and no memory is allocated. Hidden 12288, batch 1 x 2048, checkpointed blocks, bf16, a
budget of 40 GiB of device memory, rates of an H200. One JSON line per model.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from gpt import GPT, Shape
from torch import fx

from passes.pipeline import Captured, Choices, Limits, finish, outline
from passes.plan import Parameter, StepPlan
from pstar_compile import ops
from pstar_compile.capture import inner_symbols, partition
from pstar_compile.config import ManageConfig
from pstar_compile.hardware import named_rates
from pstar_compile.managed import _manage
from pstar_compile.runtime.parameter import ManagedParameter
from pstar_compile.torch_compat import aot_compile

BUDGET = 40 * 2**30


class Planned(Exception):
    """Ends the compilation once the plan is made."""

    def __init__(self, plan: StepPlan, nodes: int, seconds: float) -> None:
        super().__init__("planned")
        self.plan = plan
        self.nodes = nodes
        self.seconds = seconds


def plan_only(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """A torch.compile backend that stops when the plan is made."""
    owners = {i: ops.owner_of(v) for i, v in enumerate(example_inputs)}
    managed = {i: o for i, o in owners.items() if isinstance(o, ManagedParameter)}
    index = {position: i for i, position in enumerate(managed)}
    graphs: list[Any] = []

    def split(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        graphs.append(partition(joint, inputs, index, rewrite=False, **kwargs))
        return graphs[0].forward, graphs[0].backward

    def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        started = time.perf_counter()
        captured = Captured(
            forward=graph,
            backward=graphs[0].backward,
            saved=graphs[0].saved,
            parameters=tuple(
                Parameter(
                    name=p.name,
                    shape=p.shape,
                    dtype=p.dtype,
                    nbytes=p.nbytes,
                    requires_grad=True,
                )
                for p in managed.values()
            ),
            symbols=inner_symbols(graph.graph),
        )
        states = sum(p.nbytes for p in managed.values())
        limits = Limits(
            budget_bytes=BUDGET,
            arena_limit=None,
            reserved_bytes=0,
            master_bytes=0,
            state_bytes=4 * states,
            resident_bytes=2 * states,
        )
        common: dict[str, Any] = {
            "limits": limits,
            "choices": Choices(),
            "rates": named_rates("H200"),
        }
        outlined = outline(captured, fixed=(), home=None, **common)
        plan = finish(outlined, internal=None, symbols=captured.symbols, **common)
        nodes = len(graph.graph.nodes) + len(graphs[0].backward.graph.nodes)
        raise Planned(plan, nodes, time.perf_counter() - started)

    return aot_compile(
        gm,
        example_inputs,
        forward=forward,
        backward=forward,
        inference=forward,
        partition=split,
        decompositions={},
    )


def main() -> None:
    """Plan each model and print what it took."""
    for layers in (12, 24, 48, 96):
        torch._dynamo.reset()
        shape = Shape(hidden=12288, layers=layers, heads=96, sequence=2048)
        with torch.device("meta"):
            model = GPT(shape).to(torch.bfloat16)
        # manage() wants real memory; the anchors on the CPU are all that tracing needs.
        _manage(model, ManageConfig(device=torch.device("cpu"), device_memory=BUDGET))
        tokens = torch.zeros(1, shape.sequence, dtype=torch.long)
        started = time.perf_counter()
        try:
            torch.compile(model, backend=plan_only)(tokens, tokens)
        except Exception as error:
            found = getattr(error, "inner_exception", error)
            if not isinstance(found, Planned):
                raise
            planned = found
        print(
            json.dumps(
                {
                    "layers": layers,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "nodes": planned.nodes,
                    "trace_s": round(time.perf_counter() - started - planned.seconds, 2),
                    "passes_s": round(planned.seconds, 2),
                    "chunks": len(planned.plan.chunks),
                    "moments": len(planned.plan.moments),
                    "predicted_peak_gib": round(planned.plan.peak_device_bytes / 2**30, 2),
                    "process_gib": round(
                        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2
                    ),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
