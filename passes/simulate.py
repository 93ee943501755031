"""Simulate: a schedule against time.

In: chunks, moments, a schedule, the machine's rates. Out: when each action starts and ends. Each
stream runs its actions in order; an action starts when its stream is free and all that it waits for
is complete. Host time is taken to be free: launching runs ahead. The step follows an unchanged one:
the first fetches of carried chunks take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.plan import Action, Chunk, Kind, Moment, Rates, Schedule, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Predicted times, in seconds from the start of the step.

    Attributes:
        spans: start and end of each action.
        step_seconds: end of the last action.
        wait_seconds: time that the compute stream spends waiting for other streams.
    """

    spans: tuple[tuple[float, float], ...]
    step_seconds: float
    wait_seconds: float


def simulate(
    chunks: Sequence[Chunk], moments: Sequence[Moment], schedule: Schedule, rates: Rates
) -> Timeline:
    """Predict the times of all actions of ``schedule``."""
    seconds = {moment.index: moment.seconds for moment in moments}
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
            end = start + _duration(action, seconds, rates)
        free[action.stream] = end
        spans.append((start, end))
    return Timeline(
        spans=tuple(spans),
        step_seconds=max((end for _, end in spans), default=0.0),
        wait_seconds=waited,
    )


def _duration(action: Action, seconds: dict[int, float], rates: Rates) -> float:
    match action.kind:
        case Kind.COMPUTE:
            return seconds[action.moment] + rates.segment_latency
        case Kind.FETCH:
            return action.nbytes / rates.h2d + rates.transfer_latency
        case Kind.OFFLOAD:
            return action.nbytes / rates.d2h + rates.transfer_latency
        case Kind.REDUCE if action.offset is not None:
            return 2 * action.nbytes / rates.memory
        case _:
            return 0.0
