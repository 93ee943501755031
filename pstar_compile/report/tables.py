"""A plan as tables: totals, chunks, and the schedule by moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from passes.plan import Action, Chunk, Home, Kind, StepPlan
from pstar_compile.config import format_bytes

_NAMES_SHOWN = 2


def totals_table(plan: StepPlan) -> str:
    """Predicted peak, traffic and time."""
    live = max((m.live_bytes for m in plan.moments), default=0)
    limits = [
        f"{name} {format_bytes(limit)}"
        for name, limit in (
            ("device", plan.budget_bytes),
            ("arena", plan.arena_limit),
            ("host", plan.host_limit),
        )
        if limit is not None
    ]
    at_home = sum(chunk.home is Home.DEVICE for chunk in plan.chunks)
    rows = [
        ("chunks", f"{len(plan.chunks)}, {at_home} of them at home on the device"),
        ("moments", len(plan.moments)),
        ("memory limit", ", ".join(limits) or "none"),
        ("predicted device peak", format_bytes(plan.peak_device_bytes)),
        ("  chunk arena", format_bytes(plan.schedule.arena_bytes)),
        ("  model states at home on the device", format_bytes(plan.device_state_bytes)),
        ("  non-model data", format_bytes(live)),
        ("  reserved", format_bytes(plan.reserved_bytes)),
        *([("  casting", format_bytes(plan.staging_bytes))] if plan.staging_bytes else []),
        ("predicted host peak", format_bytes(plan.peak_host_bytes)),
        ("  model states at home on the host", format_bytes(plan.host_state_bytes)),
        ("  compute copies beside them", format_bytes(plan.host_copy_bytes)),
        ("  gradients", format_bytes(plan.host_gradient_bytes)),
        ("host to device per step", format_bytes(plan.h2d_bytes)),
        ("device to host per step", format_bytes(plan.d2h_bytes)),
        ("predicted step time", f"{plan.step_seconds * 1e3:.2f} ms"),
        ("  of it waiting for copies", f"{plan.wait_seconds * 1e3:.2f} ms"),
    ]
    if plan.carried_bytes:
        position = next(i for i, row in enumerate(rows) if row[0].startswith("host to device"))
        rows.insert(
            position + 1, ("  skipped after an unchanged step", format_bytes(plan.carried_bytes))
        )
    rows += [("note", note) for note in plan.notes]
    return tabulate(rows, tablefmt="plain")


def chunk_table(plan: StepPlan) -> str:
    """Each chunk's size, content and lifetime (first and last moment that needs it)."""
    needed: dict[int, list[int]] = defaultdict(list)
    reduced: dict[int, int] = {}
    for moment in plan.moments:
        for chunk in moment.needs:
            needed[chunk].append(moment.index)
        for chunk in moment.reduces:
            reduced[chunk] = moment.index
    rows = [
        (
            chunk.index,
            format_bytes(chunk.nbytes),
            str(chunk.dtype).removeprefix("torch."),
            _home(chunk),
            _content(chunk, plan),
            _ranges(needed[chunk.index]),
            reduced.get(chunk.index, "-"),
        )
        for chunk in plan.chunks
    ]
    return tabulate(
        rows,
        headers=("chunk", "size", "dtype", "home", "content", "read at moments", "gradient at"),
        disable_numparse=True,
    )


def schedule_table(plan: StepPlan) -> str:
    """What happens at each moment: memory nodes around its segment, and bytes in use."""
    by_moment: dict[int, list[Action]] = defaultdict(list)
    for action in plan.actions():
        by_moment[action.moment].append(action)
    rows = []
    for moment in plan.moments:
        actions = by_moment[moment.index]
        rows.append(
            (
                moment.index,
                moment.direction,
                _list(moment.needs),
                _list(_chunks(actions, Kind.WAIT)),
                _list(_chunks(actions, Kind.FETCH)),
                _list(_chunks(actions, Kind.RELEASE)),
                _list(_chunks(actions, Kind.REDUCE)),
                _list(_chunks(actions, Kind.OFFLOAD)),
                _list(_chunks(actions, Kind.DISCARD)),
                format_bytes(moment.live_bytes),
                f"{moment.seconds * 1e3:.2f}",
            )
        )
    headers = (
        "moment",
        "graph",
        "reads",
        "wait",
        "fetch",
        "release",
        "reduce",
        "offload",
        "discard",
        "non-model",
        "ms",
    )
    return tabulate(rows, headers=headers, disable_numparse=True)


def _home(chunk: Chunk) -> str:
    """Where the states are, and whether masters move (and gradients as wide as they are)."""
    what = ", masters" if chunk.masters else ""
    return f"{chunk.home}{what}{' and gradients' if chunk.wide else ''}"


def _chunks(actions: Iterable[Action], kind: Kind) -> list[int]:
    return [a.chunk for a in actions if a.kind is kind and a.chunk is not None]


def _list(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _content(chunk: Chunk, plan: StepPlan) -> str:
    names = [plan.parameters[s.parameter].name for s in chunk.content]
    shown = ", ".join(names[:_NAMES_SHOWN])
    hidden = len(names) - _NAMES_SHOWN
    return shown if hidden <= 0 else f"{shown} and {hidden} more"


def _ranges(moments: Sequence[int]) -> str:
    """Moments as ranges: ``0-2 7``."""
    ranges: list[list[int]] = []
    for moment in moments:
        if ranges and moment == ranges[-1][1] + 1:
            ranges[-1][1] = moment
        else:
            ranges.append([moment, moment])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) or "-"
