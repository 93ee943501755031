from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from passes.direct import Direct, direct
from passes.plan import Direction, Home
from tests.passes.plans import UNIT, Step, leaving, moments_of, palindrome, random_steps, units


def _direct(step: Step) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The chunks whose gradient leaves directly, whole, and the discards."""
    chunks, moments = step
    found = direct(chunks, moments)
    assert found.nbytes == {c: chunks[c].nbytes for c in found.nbytes}
    return sorted(found.nbytes), dict(found.discards)


# A palindrome of four: m4 reduces chunk 3, m5 chunk 2, m6 chunk 1, m7 chunk 0.


def test_with_room_beside_the_largest_moment_every_gradient_leaves() -> None:
    step = leaving(palindrome(4), 0, 0, 0, 4, 0, 0, 0, 0)
    # Chunk 3 is held while m5 and m6 compute. The others are late, and there is room for all
    # three of them until m3.
    assert _direct(step) == ([0, 1, 2, 3], {7: (3,), 3: (2, 1, 0)})


def test_without_room_only_what_nothing_computes_beside_leaves() -> None:
    step = leaving(palindrome(4), *[4] * 8)
    # Nothing comes after m7; its gradient is discarded before m0.
    assert _direct(step) == ([0], {0: (0,)})


def test_a_gradient_is_held_while_two_moments_compute() -> None:
    # There is room while m5 and m6 compute, but not while m7 does.
    assert _direct(leaving(palindrome(4), 4, 4, 4, 4, 4, 3, 3, 4)) == ([0, 3], {7: (3,), 0: (0,)})
    # Room beside one of the two is not enough.
    assert _direct(leaving(palindrome(4), 4, 4, 4, 4, 4, 3, 4, 4)) == ([0], {0: (0,)})
    assert _direct(leaving(palindrome(4), 4, 4, 4, 4, 4, 4, 3, 4)) == ([0], {0: (0,)})


def test_a_gradient_may_be_late_if_there_is_room_up_to_the_steps_end() -> None:
    # Chunk 2 is held while m6 and m7 compute, chunk 1 while m7 does.
    assert _direct(leaving(palindrome(4), 4, 4, 4, 4, 4, 4, 3, 3)) == ([0, 2], {0: (2, 0)})
    assert _direct(leaving(palindrome(4), 4, 4, 4, 4, 4, 4, 4, 3)) == ([0, 1], {0: (1, 0)})


def test_gradients_share_the_room_first_come_first_served() -> None:
    # Room for one beside every moment: chunk 3 takes that of m5 and m6, which chunk 2 would need
    # too; chunk 1 takes that of m7.
    step = leaving(palindrome(4), 0, 0, 0, 1, 0, 0, 0, 0)
    assert _direct(step) == ([0, 1, 3], {7: (3,), 0: (1, 0)})
    # Two from one moment, in the order of its gradients.
    reduces = {3: [1, 2, 0]}
    moments = moments_of([0], [1], [2], [0], [], reduces=reduces)
    step = leaving((units(1, 2, 1), moments), 3, 0, 0, 0, 0)
    assert _direct(step) == ([1, 2], {0: (1, 2)})


@pytest.mark.parametrize(("room", "leaves"), [(UNIT - 1, False), (UNIT, True)])
def test_a_gradient_may_take_all_the_room_there_is(room: int, leaves: bool) -> None:
    chunks, moments = leaving(palindrome(4), *[4] * 8)
    tight = [replace(m, live_bytes=4 * UNIT - room) if m.index in (5, 6) else m for m in moments]
    assert (3 in direct(chunks, tight).nbytes) is leaves


def test_the_gradients_bytes_count_and_not_the_chunks() -> None:
    chunks, moments = leaving(palindrome(4), *[4] * 8, but=[0, 1, 2])
    changes = {4: {"direct": ((3, 8),)}, 5: {"live_bytes": 4 * UNIT - 8}}
    changes[6] = changes[5]
    small = [replace(m, **changes.get(m.index, {})) for m in moments]
    assert direct(chunks, small) == Direct(nbytes={3: 8}, discards={7: (3,)})


@pytest.mark.parametrize(
    ("forward", "last"),
    [
        # The first moment without room for both of them, though there is room for each.
        ((0, 0, 2), 2),
        ((0, 2, 0), 1),
        ((2, 0, 0), 0),
        # There is always room, and a discard belongs to the forward.
        ((0, 0, 0), 2),
        ((1, 1, 1), 2),
    ],
)
def test_late_gradients_are_discarded_together_where_room_ends_in_the_next_forward(
    forward: Sequence[int], last: int
) -> None:
    chunks, moments = leaving(palindrome(3), *forward, 3, 0, 0, but=[2])
    assert direct(chunks, moments) == Direct(nbytes={1: UNIT, 0: UNIT}, discards={last: (1, 0)})


def test_without_a_forward_nothing_is_late() -> None:
    chunks, moments = leaving(palindrome(4), 4, 4, 4, 4, 0, 0, 0, 0)
    backward = [replace(moments[4], live_bytes=4 * UNIT), *moments[5:]]
    found = direct(chunks, backward)
    # Positions count, not the moments' numbers: chunk 3 is discarded before the last one.
    assert found == Direct(nbytes={3: UNIT}, discards={3: (3,)})
    assert direct(chunks, backward[1:]) == Direct(nbytes={}, discards={})


def test_positions_count_and_not_the_numbers_of_the_moments() -> None:
    chunks, moments = leaving(palindrome(4), 0, 0, 0, 4, 0, 0, 0, 0)
    renumbered = [replace(m, index=m.index + 10) for m in moments]
    assert direct(chunks, renumbered) == direct(chunks, moments)


def test_chunks_of_the_device_stay_there_and_take_no_room() -> None:
    chunks, moments = leaving(palindrome(4), 0, 0, 0, 1, 0, 0, 0, 0)
    at_home = (*chunks[:3], replace(chunks[3], home=Home.DEVICE))
    # Chunk 3 would have taken the room that now chunk 2 finds.
    assert _direct((at_home, moments)) == ([0, 2], {0: (2, 0)})
    everything = tuple(replace(c, home=Home.DEVICE) for c in chunks)
    assert _direct((everything, moments)) == ([], {})


def test_only_what_one_moment_produces_as_a_whole_leaves() -> None:
    step = leaving(palindrome(4), 0, 0, 0, 4, 0, 0, 0, 0, but=[1, 3])
    assert _direct(step) == ([0, 2], {3: (2, 0)})


def test_inference_and_an_empty_step_are_left_alone() -> None:
    nothing = Direct(nbytes={}, discards={})
    assert direct(*leaving(palindrome(2, trained=False), 0, 1, 0, 0)) == nothing
    assert direct((), ()) == nothing
    assert direct(units(1), ()) == nothing


@settings(max_examples=300, deadline=None)
@given(random_steps())
def test_properties(step: Step) -> None:
    """Over two steps what is held fits below the step's largest moment, each gradient is discarded
    once, and not before two moments have computed beside it; what does not leave had no room.
    """
    chunks, moments = step
    found = direct(chunks, moments)
    offered = {c: (m.index, size) for m in moments for c, size in m.direct}
    assert all(found.nbytes[c] == offered[c][1] for c in found.nbytes)
    assert all(chunks[c].home is Home.HOST for c in found.nbytes)
    discards = [(p, c) for p, cs in found.discards.items() for c in cs]
    assert sorted(c for _, c in discards) == sorted(found.nbytes)
    ceiling = max((m.live_bytes for m in moments), default=0)
    count = len(moments)
    held: dict[int, list[int]] = {p: [] for p in range(count)}
    for position, chunk in discards:
        produced = offered[chunk][0]
        end = position if position > produced else position + count
        if end < count:
            assert end == produced + 3
        else:
            assert count <= produced + 3
            assert moments[position].direction is Direction.FORWARD
        for p in range(produced + 1, end):
            held[p % count].append(chunk)
    spare = {
        p: ceiling - m.live_bytes - sum(found.nbytes[c] for c in held[p])
        for p, m in enumerate(moments)
    }
    assert all(room >= 0 for room in spare.values())
    has_forward = any(m.direction is Direction.FORWARD for m in moments)
    for chunk, (produced, size) in offered.items():
        if chunk in found.nbytes or chunks[chunk].home is Home.DEVICE or not has_forward:
            continue
        # At the time of the choice only earlier gradients had taken room.
        span = range(produced + 1, min(produced + 3, count))
        taken = {
            p: sum(found.nbytes[c] for c in held[p] if offered[c][0] <= produced) for p in span
        }
        assert any(ceiling - moments[p].live_bytes - taken[p] < size for p in span)
