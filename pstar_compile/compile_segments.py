"""One compile per distinct segment: equal segments of different layers share their code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.extract import extract
from passes.liveness import Live
from passes.segments import Segment
from pstar_compile.config import Inner
from pstar_compile.inductor_memory import MemoryEvent, memory_events, peak_bytes
from pstar_compile.torch_compat import inductor_compile, kernels_together, run_boxed

log = logging.getLogger(__name__)


class SegmentCode(torch.nn.Module):
    """A compiled segment as a module, so that an FX graph can call it."""

    def __init__(
        self, function: Callable[[list[Any]], Any], memory: tuple[MemoryEvent, ...] | None
    ) -> None:
        super().__init__()
        self.function = function
        self.memory = memory

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the segment; ``arguments`` is emptied."""
        return self.function(arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledSegments:
    """The code of every moment's segment, and how many distinct ones there are."""

    code: Mapping[int, SegmentCode]
    distinct: int

    def internal(self, segments: Sequence[Segment], lives: Sequence[Live]) -> dict[int, int]:
        """Peak bytes inside each segment as its compiled code allocates, where that is known."""
        peaks: dict[int, int] = {}
        for moment, (segment, live) in enumerate(zip(segments, lives, strict=True)):
            memory = self.code[moment].memory
            if memory is not None:
                first_input = len(segment.parameters)
                dying = {first_input + position: nbytes for position, nbytes in live.dying}
                peaks[moment] = peak_bytes(memory, dying)
        return peaks


def compile_segments(
    segments: Sequence[tuple[Segment, fx.GraphModule]],
    parameter_values: Mapping[int, Any],
    *,
    inner: Inner,
) -> CompiledSegments:
    """Compile each distinct segment once.

    Args:
        segments: segments with the graph each was split from; the position is the moment.
        parameter_values: the FakeTensor of each parameter's compute copy.
        inner: "inductor" or "eager".
    """
    started = time.perf_counter()
    by_fingerprint: dict[str, SegmentCode] = {}
    code: dict[int, SegmentCode] = {}
    with kernels_together():
        for moment, (segment, source) in enumerate(segments):
            extracted = extract(segment, source, parameter_values)
            found = by_fingerprint.get(extracted.fingerprint)
            if found is None:
                found = by_fingerprint[extracted.fingerprint] = _compile(extracted.module, inner)
            code[moment] = found
    seconds = time.perf_counter() - started
    log.debug("%d segments, %d distinct: %.2f s", len(code), len(by_fingerprint), seconds)
    return CompiledSegments(code=code, distinct=len(by_fingerprint))


def _compile(module: fx.GraphModule, inner: Inner) -> SegmentCode:
    if inner == "eager":
        return SegmentCode(run_boxed(module), None)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    compiled, source = inductor_compile(module, inputs)
    return SegmentCode(compiled, memory_events(source))
