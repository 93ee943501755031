"""Simulate: a schedule against time.

In: chunks, moments, a schedule, the machine's rates. Out: when each action starts and ends. Each
stream runs its actions in order; an action starts when its stream is free and all that it waits for
is complete. Host time is taken to be free: launching runs ahead. The step follows an unchanged one:
the first fetches of carried chunks take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.plan import Action, Chunk, Home, Kind, Moment, Rates, Schedule, Stream, offload_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Predicted times, in seconds from the start of the step.

    Attributes:
        spans: start and end of each action.
        step_seconds: from the step's first action to the next step's, in a row of equal steps.
        wait_seconds: time that the compute stream spends waiting for other streams.
    """

    spans: tuple[tuple[float, float], ...]
    step_seconds: float
    wait_seconds: float


def simulate(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    schedule: Schedule,
    rates: Rates,
    *,
    update_follows: bool = False,
) -> Timeline:
    """Predict the times of all actions of ``schedule``.

    Args:
        chunks: the chunks.
        moments: the moments.
        schedule: what to run.
        rates: the machine's.
        update_follows: whether chunks that the schedule does not update are updated behind it, in
            the order in which the next step needs them.
    """
    seconds = {moment.index: moment.seconds for moment in moments}
    by_index = {chunk.index: chunk for chunk in chunks}
    free = dict.fromkeys(Stream, 0.0)
    spans: list[tuple[float, float]] = []
    waited = 0.0
    carried = set(schedule.carried)
    for action in schedule.actions:
        ready = max((spans[i][1] for i in action.after), default=0.0)
        start = max(free[action.stream], ready)
        if action.stream is Stream.COMPUTE:
            waited += start - free[Stream.COMPUTE]
        if action.kind is Kind.FETCH and action.chunk in carried:
            carried.remove(action.chunk)
            end = start
        else:
            end = start + _duration(action, seconds, by_index, rates)
        free[action.stream] = end
        spans.append((start, end))
    end = max((free[s] for s in Stream if s is not Stream.UPDATE), default=0.0)
    updated = {
        a.chunk: span[1]
        for a, span in zip(schedule.actions, spans, strict=True)
        if a.kind in (Kind.UPDATE, Kind.UPDATE_HOST)
    }
    if update_follows:
        end = _update_behind(chunks, moments, updated, end, rates)
    late = _late(schedule, spans, updated, end)
    return Timeline(
        spans=tuple(spans),
        step_seconds=max(end + late, _busy(schedule, spans)),
        wait_seconds=waited + late,
    )


def host_update_seconds(chunk: Chunk, rates: Rates) -> float:
    """Predicted seconds of a chunk's update on the host, with its casts there."""
    return chunk.elements * (1 / rates.update_host + chunk.host_casts / rates.cast_host)


def _update_behind(
    chunks: Sequence[Chunk],
    moments: Sequence[Moment],
    updated: dict[int | None, float],
    end: float,
    rates: Rates,
) -> float:
    """Add the ends of updates that follow the step; returns when the device is free again."""
    reduced = {c for m in moments for c in m.reduces}
    behind = [c for c in chunks if c.index in reduced and c.index not in updated]
    host = end
    for chunk in behind:
        if chunk.home is Home.HOST:
            host += host_update_seconds(chunk, rates)
            updated[chunk.index] = host
        else:
            end += chunk.elements / rates.update_device
    return end


def _late(
    schedule: Schedule,
    spans: Sequence[tuple[float, float]],
    updated: dict[int | None, float],
    end: float,
) -> float:
    """Seconds that the next step has to wait for updates when it first needs their chunks."""
    late = 0.0
    seen: set[int | None] = set()
    for action, (start, _) in zip(schedule.actions, spans, strict=True):
        if action.kind is Kind.WAIT and action.chunk in updated and action.chunk not in seen:
            seen.add(action.chunk)
            late = max(late, updated[action.chunk] - end - start)
    return late


def _busy(schedule: Schedule, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of host updates inside the step: the next step's cannot begin before they end."""
    return sum(
        end - start
        for action, (start, end) in zip(schedule.actions, spans, strict=True)
        if action.kind is Kind.UPDATE_HOST
    )


def _duration(
    action: Action, seconds: dict[int, float], chunks: dict[int, Chunk], rates: Rates
) -> float:
    match action.kind:
        case Kind.UPDATE if action.chunk is not None:
            return chunks[action.chunk].elements / rates.update_device
        case Kind.UPDATE_HOST if action.chunk is not None:
            return host_update_seconds(chunks[action.chunk], rates)
        case Kind.COMPUTE:
            return seconds[action.moment] + rates.segment_latency
        case Kind.FETCH if action.chunk is not None:
            return chunks[action.chunk].fetch_bytes / rates.h2d + rates.transfer_latency
        case Kind.OFFLOAD if action.chunk is not None:
            nbytes = offload_bytes(action, chunks[action.chunk])
            return nbytes / rates.d2h + rates.transfer_latency
        case Kind.REDUCE if action.offset is not None:
            return 2 * action.nbytes / rates.memory
        case _:
            return 0.0
