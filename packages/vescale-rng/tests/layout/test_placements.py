"""Property: a layout names the elements that chunking the whole tensor axis by axis leaves.

And the boxes of all coordinates of a mesh hold every element as often as it is replicated.
"""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from rng_cases import cases
from rng_pieces import Replicate, Shard, boxes_of, strided
from vescale_rng import LayoutError, layout_of, whole


def chunk(tensor, dim, parts, index):
    """The rule itself: `torch.chunk`, and nothing where it gives fewer chunks."""
    chunks = tensor.chunk(parts, dim) if tensor.shape[dim] else ()
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def shard(tensor, placement, ranks, index):
    blocks = [
        chunk(tensor, placement.dim, placement.blocks, block) for block in range(placement.blocks)
    ]
    return torch.cat([chunk(b, placement.dim, ranks, index) for b in blocks], placement.dim)


@given(cases())
def test_boxes_are_what_chunking_leaves(case):
    numel = 1
    for extent in case.shape:
        numel *= extent
    tensor = torch.arange(numel).reshape(case.shape)
    for coordinate in case.coordinates():
        expected = tensor
        for placement, ranks, index in zip(case.placements, case.mesh, coordinate, strict=True):
            if isinstance(placement, Shard):
                expected = shard(expected, placement, ranks, index)
        layout = case.layout(coordinate)
        assert layout.local_shape == tuple(expected.shape)
        local = strided(expected.shape, case.order, torch.int64).fill_(-1)
        for slices, view in boxes_of(local, layout):
            view.copy_(tensor[slices])
        assert torch.equal(local, expected)


def test_replicas_are_counted_over_the_axes_that_copy():
    class Partial:
        reduce_op = "sum"

    placements = (Replicate(), Shard(0), Replicate(), Partial())
    found = [
        layout_of((8,), placements, (2, 2, 3, 2), coordinate).replica
        for coordinate in product(range(2), range(2), range(3), range(2))
    ]
    assert sorted(set(found)) == [(i, 6) for i in range(6)]


def test_negative_dims_count_from_the_end():
    assert layout_of((4, 6), [Shard(-1)], (2,), (1,)) == layout_of((4, 6), [Shard(1)], (2,), (1,))


WRONG = [
    (((4,), [Shard(0)], (2, 2), (0, 0)), "one placement"),
    (((4,), [Shard(0)], (2,), (2,)), "not on a mesh"),
    (((4,), [Shard(0)], (2,), (-1,)), "not on a mesh"),
    (((4,), [Shard(1)], (2,), (0,)), "shards dim 1"),
    (((), [Shard(0)], (2,), (0,)), "shards dim 0"),
    (((-4,), [Shard(0)], (2,), (0,)), "negative"),
    (((4,), [Shard(0, blocks=0)], (2,), (0,)), "0 blocks"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(LayoutError, match=words):
        layout_of(*arguments)


def test_a_memory_order_must_name_every_dim():
    with pytest.raises(LayoutError, match="each dim"):
        layout_of((4, 4), [Shard(0)], (2,), (0,), memory_order=(0,))
    with pytest.raises(LayoutError, match="each dim"):
        whole((4, 4), (1, 1))


def test_what_a_layout_remembers_is_bounded_and_its_own():
    layout = layout_of((64, 8), [Shard(0)], (4,), (1,))
    other = replace(layout)
    for size in range(200):
        assert layout.remembered(size, lambda size=size: [size]) == [size]
    assert len(layout._memo) <= 64
    assert layout.remembered(199, lambda: None) == [199]
    assert layout == other
    assert hash(layout) == hash(other)
    for made in (other, copy.copy(layout), copy.deepcopy(layout)):
        assert made == layout
        assert not made._memo
