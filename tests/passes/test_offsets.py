from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from passes.offsets import Arena, Place, extent, pack
from passes.plan import ALIGNMENT, align

UNIT = ALIGNMENT

_sizes = st.sampled_from([0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 2 * UNIT + 8, 3 * UNIT])
_capacity = st.integers(0, 9 * UNIT)

Blocks = dict[int, tuple[int, int]]
"""Offset and bytes, by key."""


@st.composite
def _blocks(draw: st.DrawFn, *, count: int = 5) -> tuple[int, Blocks]:
    """A capacity and blocks that lie in it, with gaps."""
    blocks: Blocks = {}
    free = 0
    for key in range(draw(st.integers(0, count))):
        start = free + draw(st.integers(0, 2)) * UNIT
        size = draw(_sizes.filter(bool))
        blocks[key] = (start, size)
        free = align(start + size)
    end = max((start + size for start, size in blocks.values()), default=0)
    return end + draw(st.integers(0, 3 * UNIT)), blocks


def _arena(capacity: int, blocks: Blocks) -> Arena:
    arena = Arena(capacity)
    for key in sorted(blocks, reverse=True):  # in any order
        arena.insert(key, *blocks[key])
    return arena


def _hit(offset: int, nbytes: int, blocks: Blocks) -> set[int]:
    """Keys of the blocks that share a byte with the range."""
    return {
        k
        for k, (start, size) in blocks.items()
        if start < offset + nbytes and offset < start + size
    }


def test_the_tightest_gap_is_taken() -> None:
    arena = _arena(8 * UNIT, {0: (0, UNIT), 1: (3 * UNIT, UNIT), 2: (5 * UNIT, UNIT)})
    assert arena.place(UNIT, lambda key: None) == Place(offset=4 * UNIT, evict=())
    assert arena.place(2 * UNIT, lambda key: None) == Place(offset=UNIT, evict=())


def test_what_is_used_again_furthest_away_leaves() -> None:
    arena = _arena(7 * UNIT, {0: (0, 2 * UNIT), 1: (3 * UNIT, UNIT), 2: (5 * UNIT, 2 * UNIT)})
    uses = {0: 9, 1: 4, 2: 12}
    assert arena.place(2 * UNIT, uses.get) == Place(offset=4 * UNIT, evict=(2,))
    assert arena.place(4 * UNIT, uses.get) == Place(offset=0, evict=(0, 1))
    assert arena.place(4 * UNIT, {0: 9, 2: 12}.get) is None


def test_a_preferred_place_is_taken_when_it_costs_no_more() -> None:
    arena = _arena(4 * UNIT, {0: (0, UNIT), 1: (UNIT, UNIT)})
    assert arena.place(UNIT, lambda key: None, preferred=3 * UNIT) == Place(
        offset=3 * UNIT, evict=()
    )
    full = _arena(2 * UNIT, {0: (0, UNIT), 1: (UNIT, UNIT)})
    assert full.place(UNIT, {0: 5, 1: 5}.get, preferred=UNIT) == Place(offset=UNIT, evict=(1,))
    assert full.place(UNIT, {0: 5, 1: 4}.get, preferred=UNIT) == Place(offset=0, evict=(0,))


def test_nothing_needs_no_place() -> None:
    assert Arena(0).place(0, lambda key: None) == Place(offset=0, evict=())
    assert Arena(0).place(1, lambda key: None) is None


@settings(max_examples=400, deadline=None)
@given(
    _blocks(),
    _sizes.filter(bool),
    st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=5, max_size=5),
    st.one_of(st.none(), st.integers(0, 8).map(lambda units: units * UNIT)),
)
def test_place_against_brute_force(
    there: tuple[int, Blocks], nbytes: int, uses: list[int | None], preferred: int | None
) -> None:
    capacity, blocks = there
    place = _arena(capacity, blocks).place(nbytes, lambda key: uses[key], preferred)
    # The soonest next use of what must leave, at every offset where all of it may.
    costs: dict[int, float] = {}
    for offset in range(0, capacity - nbytes + 1, UNIT):
        leaving = [uses[key] for key in _hit(offset, nbytes, blocks)]
        if None not in leaving:
            costs[offset] = min((use for use in leaving if use is not None), default=float("inf"))
    if place is None:
        assert not costs
        return
    assert place.offset % UNIT == 0 and place.offset + nbytes <= capacity
    assert set(place.evict) == _hit(place.offset, nbytes, blocks)
    assert len(place.evict) == len(set(place.evict))
    assert costs[place.offset] == max(costs.values())
    if preferred is not None and costs.get(preferred, -1) == float("inf"):
        assert place.offset == preferred
    elif not place.evict:
        free = [offset for offset, cost in costs.items() if cost == float("inf")]
        assert _gap(place.offset, capacity, blocks) == min(
            _gap(offset, capacity, blocks) for offset in free
        )
    elif preferred is not None and costs.get(preferred, -1) == max(costs.values()):
        assert place.offset == preferred


def _gap(offset: int, capacity: int, blocks: Blocks) -> int:
    """Bytes of the free gap around an offset, from its first aligned byte on."""
    before = [align(start + size) for start, size in blocks.values() if start < offset]
    behind = [start for start, _ in blocks.values() if start > offset]
    return min(behind, default=capacity) - max(before, default=0)


@settings(max_examples=200, deadline=None)
@given(_blocks(), st.integers(0, 9 * UNIT), _sizes, st.sets(st.integers(0, 4)))
def test_overlapping_against_brute_force(
    there: tuple[int, Blocks], offset: int, nbytes: int, removed: set[int]
) -> None:
    capacity, blocks = there
    arena = _arena(capacity, blocks)
    for key in removed:
        arena.remove(key)
    left = {key: block for key, block in blocks.items() if key not in removed}
    expected = _hit(offset, nbytes, left) if nbytes else set()
    found = arena.overlapping(offset, nbytes)
    assert set(found) == expected and len(found) == len(expected)


def test_a_block_of_zero_bytes_lies_nowhere() -> None:
    arena = Arena(UNIT)
    arena.insert(0, 0, 0)
    assert arena.overlapping(0, UNIT) == ()
    arena.remove(0)
    assert arena.place(UNIT, lambda key: None) == Place(offset=0, evict=())


@settings(max_examples=200, deadline=None)
@given(st.lists(_sizes, max_size=5))
def test_extent_against_brute_force(sizes: list[int]) -> None:
    def end(order: Sequence[int]) -> int:
        last = 0
        for size in order:
            last = align(last) + size if size else last
        return last

    assert extent(sizes) == min(map(end, permutations(sizes)))


def test_padding_may_reach_past_the_arenas_end() -> None:
    assert pack([UNIT + 1, UNIT], (), 2 * UNIT + 1) == (UNIT, 0)
    assert pack([UNIT + 1, UNIT], (), 2 * UNIT) is None


@settings(max_examples=400, deadline=None)
@given(_blocks(count=3), st.lists(_sizes, max_size=4), st.booleans())
def test_pack_against_brute_force(
    there: tuple[int, Blocks], sizes: list[int], from_top: bool
) -> None:
    capacity, blocks = there
    offsets = pack(sizes, blocks.values(), capacity, from_top=from_top)
    if offsets is None:
        starts = range(0, capacity, UNIT)
        wanted = [size for size in sizes if size]
        assert not any(
            _lie(wanted, choice, capacity, blocks) for choice in product(starts, repeat=len(wanted))
        )
        return
    assert len(offsets) == len(sizes)
    placed = [(offset, size) for offset, size in zip(offsets, sizes, strict=True) if size]
    assert _lie([s for _, s in placed], [o for o, _ in placed], capacity, blocks)


def _lie(sizes: Sequence[int], offsets: Sequence[int], capacity: int, blocks: Blocks) -> bool:
    """Whether blocks at these offsets are in the arena, aligned, and apart from all others."""
    there = dict(enumerate(blocks.values()))
    for offset, size in zip(offsets, sizes, strict=True):
        if offset % UNIT or offset < 0 or offset + size > capacity or _hit(offset, size, there):
            return False
        there[len(there)] = (offset, size)
    return True


@settings(max_examples=200, deadline=None)
@given(_sizes.filter(bool), _capacity)
def test_from_top_leaves_the_bottom_free(size: int, capacity: int) -> None:
    bottom = pack([size], (), capacity)
    top = pack([size], (), capacity, from_top=True)
    assert (bottom is None) == (top is None) == (size > capacity)
    if bottom is not None and top is not None:
        assert bottom == (0,)
        assert top == ((capacity - size) // UNIT * UNIT,)
