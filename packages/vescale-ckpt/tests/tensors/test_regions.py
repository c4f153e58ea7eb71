"""Box arithmetic agrees with doing it element by element."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vescale_ckpt._errors import FormatError
from vescale_ckpt._tensors.regions import (
    Region,
    blocks_touched,
    first_overlap,
    intersect,
    split,
    whole,
)


def elements(region):
    spans = [range(o, o + n) for o, n in zip(region.offset, region.shape, strict=True)]
    return set(itertools.product(*spans))


@st.composite
def region_in(draw, outer, smallest=1):
    offset, shape = [], []
    for o, n in zip(outer.offset, outer.shape, strict=True):
        start = draw(st.integers(0, n - smallest))
        offset.append(o + start)
        shape.append(draw(st.integers(smallest, n - start)))
    return Region(tuple(offset), tuple(shape))


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@given(shapes.flatmap(lambda s: st.tuples(region_in(whole(s)), region_in(whole(s)))))
def test_intersection(pair):
    a, b = pair
    common = intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)


@given(shapes.flatmap(lambda s: st.lists(region_in(whole(s)), max_size=5)))
def test_first_overlap_finds_one_if_there_is_one(regions):
    pairs = itertools.combinations(regions, 2)
    assert bool(first_overlap(regions)) == any(elements(a) & elements(b) for a, b in pairs)
    found = first_overlap(regions)
    assert found is None or elements(found[0]) & elements(found[1])


@given(shapes.map(whole).flatmap(region_in), st.integers(1, 40))
def test_split_covers_once_within_the_limit(region, limit):
    slabs = split(region, limit)
    assert sum(slab.numel for slab in slabs) == region.numel
    assert set().union(*map(elements, slabs)) == elements(region)
    assert all(slab.numel <= limit for slab in slabs)


@st.composite
def outer_and_inner(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple))
    outer = Region(tuple(draw(st.integers(0, 3)) for _ in shape), shape)
    return outer, draw(region_in(outer))


@given(outer_and_inner(), st.sampled_from([1, 2, 8]), st.sampled_from([16, 32, 48, 400]))
def test_blocks_touched_are_exactly_those_that_hold_an_element(regions, itemsize, block):
    outer, inner = regions
    flat = np.arange(outer.numel).reshape(outer.shape)
    window = tuple(
        slice(i - o, i - o + n)
        for o, i, n in zip(outer.offset, inner.offset, inner.shape, strict=True)
    )
    needed = {int(e) * itemsize // block for e in flat[window].reshape(-1)}
    ranges = blocks_touched(outer, inner, itemsize, block)
    assert [b for r in ranges for b in r] == sorted(needed)
    assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))


def test_thin_slices_of_a_huge_chunk_stay_cheap():
    # 100 million rows of 4 bytes: a list of runs would not fit into memory.
    outer, inner = whole((100_000_000, 2)), Region((0, 1), (100_000_000, 1))
    (only,) = blocks_touched(outer, inner, 2, 1 << 18)
    assert only == range(0, -(-400_000_000 // (1 << 18)))


def test_a_region_reads_like_a_slice():
    assert str(whole(())) == "[]"
    assert str(Region((1, 0), (2, 3))) == "[1:3, 0:3]"


def test_boxes_beside_each_other_are_compared_within_bounds(monkeypatch):
    monkeypatch.setattr("vescale_ckpt._tensors.regions._MOST_COMPARED", 100_000)
    grid = [Region((i, j), (1, 1)) for i in range(64) for j in range(64)]
    assert first_overlap(grid[:1500]) is None
    long = [Region((i, i), (1000, 1)) for i in range(1000)]
    with pytest.raises(FormatError, match="1000 boxes of a tensor"):
        first_overlap(long)
