from __future__ import annotations

import operator
from collections.abc import Mapping

import pytest
import torch
from torch import fx

from passes.gradients import whole_gradients
from passes.lifetimes import lifetimes
from passes.localize import localize
from passes.plan import Chunk, Home, Slot
from passes.segments import split
from tests.passes.graphs import Builder, aten

BYTES = 4 * 4 * 4
"""Of a gradient of 4 x 4 float32."""


def _chunks(chunk_of: Mapping[int, int], dtype: torch.dtype = torch.float32) -> list[Chunk]:
    """Chunks of parameters of 4 x 4."""
    nbytes = 16 * dtype.itemsize
    found = []
    for index in sorted(set(chunk_of.values())):
        members = [p for p, c in chunk_of.items() if c == index]
        content = tuple(
            Slot(parameter=p, offset=256 * i, nbytes=nbytes) for i, p in enumerate(members)
        )
        found.append(
            Chunk(
                index=index,
                home=Home.HOST,
                dtype=dtype,
                requires_grad=True,
                content=content,
                nbytes=256 * (len(members) - 1) + nbytes,
            )
        )
    return found


def _whole(
    gm: fx.GraphModule, chunk_of: dict[int, int], dtype: torch.dtype = torch.float32
) -> tuple[tuple[tuple[int, int], ...], ...]:
    localize(gm)
    segments = split(lifetimes(gm.graph), chunk_of, graph=gm.graph)
    return whole_gradients(segments, _chunks(chunk_of, dtype))


def _of_one(b: Builder, value: fx.Node, parameter: int = 0) -> tuple[tuple[int, int], ...]:
    """What the only segment of a graph completes, if this is the only gradient."""
    b.reduce(value, parameter)
    (only,) = _whole(b.output(), {0: 0, 1: 1})
    return only


def test_each_segment_completes_its_own_chunks() -> None:
    b = Builder()
    x = b.input(4, 4)
    first = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    second = b.call(aten.mm.default, first, b.fetch(1, 4, 4))
    b.reduce(second, 1)
    b.reduce(first, 0)
    assert _whole(b.output(), {0: 0, 1: 1}) == (((0, BYTES),), ((1, BYTES),))


def test_one_segment_may_complete_several_chunks() -> None:
    b = Builder()
    x = b.input(4, 4)
    product = b.call(aten.addmm.default, b.fetch(0, 4, 4), x, b.fetch(1, 4, 4))
    b.reduce(b.call(aten.relu.default, product), 1)
    b.reduce(b.call(aten.neg.default, product), 0)
    assert _whole(b.output(), {0: 0, 1: 1}) == (((1, BYTES), (0, BYTES)),)


def test_a_chunks_bytes_are_those_of_all_its_gradients_without_padding() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(b.call(aten.relu.default, y), 0)
    b.reduce(b.call(aten.neg.default, y), 1)
    assert _whole(b.output(), {0: 0, 1: 0}) == (((0, 2 * BYTES),),)


def test_a_parameter_without_a_gradient_adds_nothing() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(y, 0)
    assert _whole(b.output(), {0: 0, 1: 0, 2: 1}) == (((0, BYTES),),)


def test_a_chunk_in_two_moments_is_whole_in_neither() -> None:
    b = Builder()
    x = b.input(4, 4)
    first = b.call(aten.mm.default, x, b.fetch(0, 4, 4))
    between = b.call(aten.mm.default, first, b.fetch(1, 4, 4))
    last = b.call(aten.mm.default, between, b.fetch(2, 4, 4))
    b.reduce(first, 0)
    b.reduce(between, 1)
    b.reduce(last, 2)
    # Parameters 0 and 2 share chunk 0; chunk 1 is in no other segment.
    assert _whole(b.output(), {0: 0, 1: 1, 2: 0}) == ((), ((1, BYTES),), ())


def test_a_parameter_with_two_gradients_makes_its_chunk_unfit() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(b.call(aten.relu.default, y), 0)
    b.reduce(b.call(aten.neg.default, y), 0)
    # Its neighbor in the chunk cannot leave alone either.
    b.reduce(b.call(aten.exp.default, y), 1)
    b.reduce(b.call(aten.sin.default, y), 2)
    assert _whole(b.output(), {0: 0, 1: 0, 2: 1}) == ((), ((1, BYTES),))


def test_a_gradient_of_another_dtype_does_not_leave() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(y, 0)
    b.reduce(b.call(aten._to_copy.default, y, dtype=torch.bfloat16), 1)
    gm, chunk_of = b.output(), {0: 0, 1: 1}
    assert _whole(gm, chunk_of) == (((0, BYTES),), ())
    assert _whole(gm, chunk_of, torch.bfloat16) == ((), ((1, BYTES // 2),))


def test_a_gradient_that_is_not_contiguous_does_not_leave() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    turned = b.call(aten.permute.default, y, [1, 0])
    assert _of_one(b, turned) == ()


def test_one_unfit_gradient_keeps_its_chunk() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(y, 0)
    b.reduce(b.call(aten.permute.default, y, [1, 0]), 1)
    b.reduce(b.call(aten.neg.default, y), 2)
    assert _whole(b.output(), {0: 0, 1: 0, 2: 0}) == ((),)


def test_a_view_of_all_of_a_tensor_leaves() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(2, 4), b.fetch(0, 4, 8))
    assert _of_one(b, b.call(aten.view.default, y, [4, 4])) == ((0, BYTES),)


@pytest.mark.parametrize("first", [True, False])
def test_a_view_of_a_larger_tensor_does_not_leave(first: bool) -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(8, 4), b.fetch(0, 4, 4))
    part = b.call(aten.slice.Tensor, y, 0, 0 if first else 4, 4 if first else 8)
    assert part.meta["val"].is_contiguous()
    # Through a second view it is still a part of the larger one.
    assert _of_one(b, b.call(aten.view.default, part, [4, 4])) == ()


def test_a_part_of_a_tuple_of_views_does_not_leave_and_of_a_tuple_of_tensors_does() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(8, 4), b.fetch(0, 4, 4))
    halves = b.call(aten.split.Tensor, y, 4)
    half = b.call(operator.getitem, halves, 0)
    assert _of_one(b, half) == ()
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    largest = b.call(aten.topk.default, y, 4)
    assert _of_one(b, b.call(operator.getitem, largest, 0)) == ((0, BYTES),)


def test_what_the_caller_gave_does_not_leave() -> None:
    b = Builder()
    x = b.input(4, 4)
    b.call(aten.mm.default, x, b.fetch(1, 4, 4))
    assert _of_one(b, x) == ()
    b = Builder()
    x = b.input(2, 8)
    viewed = b.call(aten.view.default, x, [4, 4])
    assert _of_one(b, viewed) == ()
    b = Builder()
    x = b.input(2, 8)
    copied = b.call(aten.clone.default, b.call(aten.view.default, x, [4, 4]))
    assert _of_one(b, copied) == ((0, BYTES),)


def test_a_weight_as_a_gradient_does_not_leave() -> None:
    b = Builder()
    weight = b.fetch(1, 2, 8)
    b.call(aten.relu.default, b.input(4, 4))
    assert _of_one(b, b.call(aten.view.default, weight, [4, 4])) == ()


def test_inference_has_none() -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    y = b.call(aten.mm.default, y, b.fetch(1, 4, 4))
    assert _whole(b.output(y), {0: 0, 1: 1}) == ((), ())
    assert whole_gradients((), ()) == ()


@pytest.mark.parametrize("view", [False, True])
def test_what_the_caller_gets_stays_with_it(view: bool) -> None:
    b = Builder()
    y = b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    b.reduce(y, 0)
    returned = b.call(aten.t.default, y) if view else y
    assert _whole(b.output(returned), {0: 0}) == ((),)


def test_a_constant_is_not_the_graphs_to_give_away() -> None:
    b = Builder()
    b.call(aten.mm.default, b.input(4, 4), b.fetch(0, 4, 4))
    assert _of_one(b, b.constant(torch.ones(4, 4))) == ()
