"""Homes: the device is filled first, in the order in which gradients come last."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from passes.arrange import arrange, with_homes
from passes.limits import Choices, Limits
from passes.placement import States, together
from passes.placement import fill as fill_device
from passes.plan import Chunk, Direction, Home, Moment, Slot
from tests.passes.plans import RATES

UNIT = 256
"""Bytes of every chunk's compute copies."""


def _chunks(count: int, *, frozen: int | None = None) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(
            index=i,
            home=Home.HOST,
            dtype=torch.float32,
            requires_grad=i != frozen,
            content=(Slot(parameter=i, offset=0, nbytes=UNIT),),
            nbytes=UNIT,
        )
        for i in range(count)
    )


def _moments(count: int, *, live: int = 0, frozen: int | None = None) -> tuple[Moment, ...]:
    """Each chunk is read once forward, and once backward in reverse."""
    order = [*range(count), *reversed(range(count))]
    return tuple(
        Moment(
            index=m,
            direction=Direction.FORWARD if m < count else Direction.BACKWARD,
            needs=(c,),
            reduces=(c,) if m >= count and c != frozen else (),
            seconds=1e-6,
            live_bytes=live,
        )
        for m, c in enumerate(order)
    )


def _states(
    count: int, *, nbytes: int = 2 * UNIT, room: int = 0, cast: bool = False, **homes: Home
) -> States:
    return States(
        nbytes=(nbytes,) * count,
        room=(room,) * count,
        cast=(cast,) * count,
        masters=((2 if cast else 1) * UNIT,) * count,
        homes=tuple(homes.get(f"c{i}") for i in range(count)),
        model_bytes=count * (nbytes + room + 2 * UNIT),
        resident_bytes=count * 2 * UNIT,
        others_bytes=0,
    )


def fill(
    chunks: tuple[Chunk, ...], moments: tuple[Moment, ...], states: States, *, available: int
) -> tuple[Chunk, ...]:
    return fill_device(chunks, moments, states, available=available, gradients_stay=True)


def _homes(chunks: tuple[Chunk, ...]) -> str:
    return "".join("d" if c.home is Home.DEVICE else "h" for c in chunks)


@pytest.mark.parametrize(
    ("available", "homes"),
    [
        (0, "hhhh"),
        # Copy, two states, and at the end its gradient once it is complete.
        (3 * UNIT - 1, "hhhh"),
        (3 * UNIT, "dhhh"),
        # The second one's gradient is complete while the first one's is computed.
        (7 * UNIT - 1, "dhhh"),
        (7 * UNIT, "ddhh"),
        (15 * UNIT, "dddd"),
    ],
)
def test_the_device_is_filled_with_chunks_whose_gradients_come_last(
    available: int, homes: str
) -> None:
    placed = fill(_chunks(4), _moments(4), _states(4), available=available)
    assert _homes(placed) == homes
    assert all(c.state_bytes == 2 * UNIT and c.cast_bytes == 0 for c in placed)


def test_frozen_chunks_come_first() -> None:
    states = replace(_states(3), nbytes=(2 * UNIT, 2 * UNIT, 0))
    placed = fill(_chunks(3, frozen=2), _moments(3, frozen=2), states, available=4 * UNIT)
    assert _homes(placed) == "dhd"


def test_room_for_an_unknown_optimizer_is_kept_but_not_counted() -> None:
    with_room = _states(2, nbytes=0, room=2 * UNIT)
    placed = fill(_chunks(2), _moments(2), with_room, available=3 * UNIT)
    assert _homes(placed) == "dh"
    assert [c.device_bytes for c in placed] == [UNIT, 0]
    assert _homes(fill(_chunks(2), _moments(2), with_room, available=3 * UNIT - 1)) == "hh"


def test_casts_take_room_only_while_they_are_read() -> None:
    states = _states(2, nbytes=6 * UNIT, cast=True)
    # Both masters and moments, and at the worst moment one cast and the other one's gradient.
    placed = fill(_chunks(2), _moments(2), states, available=14 * UNIT)
    assert _homes(placed) == "dd"
    assert [c.device_bytes for c in placed] == [6 * UNIT] * 2
    assert _homes(fill(_chunks(2), _moments(2), states, available=14 * UNIT - 1)) == "dh"
    live = [m.live_bytes for m in with_homes(_moments(2), placed, Choices())]
    assert live == [UNIT, UNIT, UNIT, 2 * UNIT]


def test_what_has_a_home_keeps_it_or_leaves_the_device() -> None:
    settled = _states(3, c0=Home.HOST, c1=Home.DEVICE)
    assert _homes(fill(_chunks(3), _moments(3), settled, available=100 * UNIT)) == "hdd"
    assert _homes(together(_chunks(3), settled, Home.HOST)) == "hdh"
    assert _homes(fill(_chunks(3), _moments(3), settled, available=0)) == "hhh"


def _limits(states: States, **changes: int | None) -> Limits:
    limits = Limits(budget_bytes=None, arena_limit=None, reserved_bytes=0, states=states)
    return replace(limits, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "arena", "homes"),
    [
        (None, None, "dddd"),
        # Everything, its gradients included.
        (20 * UNIT, None, "dddd"),
        (None, 8 * UNIT, "dddd"),
        # With a limit on the arena, all or nothing.
        (None, 8 * UNIT - 1, "hhhh"),
        (None, 2 * UNIT, "hhhh"),
        (16 * UNIT, 2 * UNIT, "hhhh"),
        # Else the device is filled, beside an arena.
        (16 * UNIT - 1, None, "ddhh"),
        (3 * UNIT, None, "hhhh"),
    ],
)
def test_an_arrangement_fills_what_the_limits_allow(
    budget: int | None, arena: int | None, homes: str
) -> None:
    # 16 units with gradients; live data take 4.
    moments = _moments(4, live=4 * UNIT if budget == 20 * UNIT else 0)
    arranged = arrange(
        _chunks(4),
        moments,
        limits=_limits(_states(4), budget_bytes=budget, arena_limit=arena),
        choices=Choices(),
        rates=RATES,
        whole=True,
        slots=(6,),
    )
    assert _homes(arranged.chunks) == homes
    peak = sum(c.device_bytes for c in arranged.chunks) + arranged.schedule.arena_bytes
    assert budget is None or peak + max(m.live_bytes for m in arranged.moments) <= budget


def test_a_part_of_a_step_is_placed_as_a_whole() -> None:
    arranged = arrange(
        _chunks(4),
        _moments(4),
        limits=_limits(_states(4), budget_bytes=16 * UNIT - 1),
        choices=Choices(),
        rates=RATES,
        whole=False,
    )
    assert _homes(arranged.chunks) == "hhhh"
