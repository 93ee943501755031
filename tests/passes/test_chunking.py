from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.chunking import candidate_sizes, chunk, repeating_run
from passes.plan import ALIGNMENT, Chunk, Parameter, align

F32, BF16 = torch.float32, torch.bfloat16


def _parameter(
    elements: int, dtype: torch.dtype = F32, trained: bool = True, name: str = "p"
) -> Parameter:
    return Parameter(
        name=name,
        shape=(elements,),
        dtype=dtype,
        nbytes=elements * dtype.itemsize,
        requires_grad=trained,
    )


def _chunk(
    parameters: list[Parameter],
    target: int | None,
    order: list[int] | None = None,
    spread: dict[int, int] | None = None,
) -> tuple[Chunk, ...]:
    return chunk(
        parameters,
        list(range(len(parameters))) if order is None else order,
        spread or {},
        target_bytes=target,
    )


def _members(chunks: tuple[Chunk, ...]) -> list[list[int]]:
    return [[s.parameter for s in c.content] for c in chunks]


def test_packs_in_first_use_order_up_to_the_target() -> None:
    sizes = [64, 65, 66, 67]  # 256, 512, 512, 512 bytes with alignment
    chunks = _chunk([_parameter(n) for n in sizes], 1024, order=[2, 0, 3, 1])
    assert _members(chunks) == [[2, 0], [3, 1]]
    assert [(s.offset, s.nbytes) for s in chunks[0].content] == [(0, 264), (512, 256)]
    assert chunks[0].nbytes == 768 and chunks[0].index == 0 and chunks[1].index == 1


def test_without_a_target_each_kind_is_one_chunk() -> None:
    chunks = _chunk(
        [_parameter(5), _parameter(6, BF16), _parameter(7), _parameter(9, F32, False)], None
    )
    assert _members(chunks) == [[0, 2], [1], [3]]
    assert [(c.dtype, c.requires_grad) for c in chunks] == [(F32, True), (BF16, True), (F32, False)]


def test_a_large_parameter_is_a_chunk_of_its_own_and_closes_the_open_one() -> None:
    chunks = _chunk([_parameter(64), _parameter(1000), _parameter(65)], 1024)
    assert _members(chunks) == [[0], [1], [2]]


def test_what_is_used_in_places_apart_is_kept_apart_unless_small() -> None:
    parameters = [_parameter(n) for n in (64, 300, 65, 66)]
    assert _members(_chunk(parameters, 4096, spread={1: 2})) == [[0], [1], [2, 3]]
    assert _members(_chunk(parameters, 4096, spread={0: 2})) == [[0, 1, 2, 3]]


def test_equal_layers_get_equal_chunks() -> None:
    layer = [_parameter(64), _parameter(128), _parameter(32)]
    parameters = [_parameter(100), *layer * 4, _parameter(77)]
    chunks = _chunk(parameters, align(256 + 512 + 128))
    # The layer, 1024 bytes with alignment, fits whole; what comes before and behind stays apart.
    assert _members(chunks) == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13]]
    geometries = {tuple((s.offset, s.nbytes) for s in c.content) for c in chunks[1:5]}
    assert len(geometries) == 1


def test_whole_layers_share_a_chunk_and_split_layers_do_not() -> None:
    layer = [_parameter(64), _parameter(128)]  # 768 bytes
    assert _members(_chunk(layer * 4, 1600)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _members(_chunk(layer * 4, 600)) == [[0], [1], [2], [3], [4], [5], [6], [7]]


def test_zero_sized_parameters_have_a_place() -> None:
    chunks = _chunk([_parameter(0), _parameter(4), _parameter(0)], 256)
    assert sorted(p for c in _members(chunks) for p in c) == [0, 1, 2]


_parameters = st.lists(
    st.builds(
        _parameter,
        st.sampled_from([0, 1, 64, 65, 200, 700]),
        st.sampled_from([F32, BF16]),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    _parameters,
    st.integers(1, 4),
    st.one_of(st.none(), st.sampled_from([256, 512, 1024, 2048, 4096])),
    st.randoms(use_true_random=False),
)
def test_properties(
    layer: list[Parameter], repeats: int, target: int | None, random: object
) -> None:
    parameters = layer * repeats
    order = list(range(len(parameters)))
    random.shuffle(order)  # type: ignore[attr-defined]
    spread = {i: random.choice([1, 2]) for i in order}  # type: ignore[attr-defined]
    chunks = _chunk(parameters, target, order, spread)
    assert sorted(p for c in _members(chunks) for p in c) == sorted(order)
    assert [c.index for c in chunks] == list(range(len(chunks)))
    for c in chunks:
        end = 0
        for slot in c.content:
            parameter = parameters[slot.parameter]
            assert slot.offset % ALIGNMENT == 0 and slot.offset >= end
            assert slot.offset == align(end), "no gaps beyond the alignment"
            assert slot.nbytes == parameter.nbytes
            assert (parameter.dtype, parameter.requires_grad) == (c.dtype, c.requires_grad)
            end = slot.offset + slot.nbytes
        assert c.nbytes == end
        if target is not None and len(c.content) > 1:
            largest = max(align(s.nbytes) for s in c.content)
            assert align(c.nbytes) <= max(target, largest) + target // 16 + ALIGNMENT
    assert chunks == _chunk(parameters, target, order, spread), "deterministic"


def _repeats(signatures: list[int], start: int, end: int, period: int) -> bool:
    stretch = signatures[start:end]
    return (
        len(stretch) >= 2 * period
        and len(stretch) % period == 0
        and all(a == b for a, b in zip(stretch, stretch[period:], strict=False))
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12))
def test_repeating_run_against_brute_force(signatures: list[int]) -> None:
    n = len(signatures)
    covered = max(
        (
            end - start
            for period in range(1, n // 2 + 1)
            for start in range(n)
            for end in range(start + 2 * period, n + 1, period)
            if _repeats(signatures, start, end, period)
        ),
        default=0,
    )
    start, end, period = repeating_run(signatures)
    if covered == 0:
        assert start == end
    else:
        assert _repeats(signatures, start, end, period)
        assert end - start == covered


def test_repeating_run_of_a_model() -> None:
    assert repeating_run(list("abcbcbcd")) == (1, 7, 2)
    assert repeating_run(list("abcd"))[0] == repeating_run(list("abcd"))[1]
    assert repeating_run([]) == (0, 0, 1)
    assert repeating_run(list("aaaa")) == (0, 4, 1)


@pytest.mark.parametrize("capacity", [100, 2048, 10**6])
def test_candidate_sizes_are_ascending_and_within_the_room(capacity: int) -> None:
    parameters = [_parameter(100), *[_parameter(64), _parameter(128)] * 6]
    order = list(range(len(parameters)))
    sizes = candidate_sizes(parameters, order, capacity_bytes=capacity)
    assert sizes and list(sizes) == sorted(set(sizes))
    largest = max(align(p.nbytes) for p in parameters)
    assert all(0 < s <= max(capacity // 2, largest) for s in sizes)
    if capacity == 10**6:
        assert {768, 1536, 2304} <= set(sizes), "one, two and three repetitions of the layer"


def test_candidate_sizes_of_empty_parameters_are_positive() -> None:
    assert all(s > 0 for s in candidate_sizes([_parameter(0)], [0], capacity_bytes=1024))
