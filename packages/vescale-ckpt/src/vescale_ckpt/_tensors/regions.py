"""Arithmetic on boxes: overlap, cover, and the byte blocks that a part of a box is in."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vescale_ckpt._errors import FormatError

Shape = tuple[int, ...]

# Pairs of boxes that are looked at for one tensor: some 20 s.
_MOST_COMPARED = 1 << 25


class Region(NamedTuple):
    """A box in global coordinates."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        spans = zip(self.offset, self.shape, strict=True)
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in spans) + "]"


def whole(shape: Shape) -> Region:
    """Return the region of an entire tensor."""
    return Region((0,) * len(shape), shape)


def intersect(a: Region, b: Region) -> Region | None:
    """Return the common part of two regions, or None where they share no element."""
    low = tuple(map(max, a.offset, b.offset))
    ends_a = (o + n for o, n in zip(a.offset, a.shape, strict=True))
    ends_b = (o + n for o, n in zip(b.offset, b.shape, strict=True))
    shape = tuple(min(p, q) - o for p, q, o in zip(ends_a, ends_b, low, strict=True))
    return Region(low, shape) if all(n > 0 for n in shape) else None


def first_overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """Find two of `regions` that share an element: a sweep along the most divided dim.

    Raises:
        FormatError: so many lie beside each other that comparing them would take minutes; boxes of
            100,000 ranks in a grid do not.
    """
    if len(regions) < 2 or not regions[0].shape:
        return (regions[0], regions[1]) if len(regions) > 1 else None
    dims = range(len(regions[0].shape))
    # The dim that is divided most leaves the fewest regions to compare at a time.
    dim = max(dims, key=lambda d: len({r.offset[d] for r in regions}))
    active: list[Region] = []
    compared = 0
    for region in sorted(regions, key=lambda r: r.offset[dim]):
        start = region.offset[dim]
        active = [r for r in active if r.offset[dim] + r.shape[dim] > start]
        compared += len(active)
        if compared > _MOST_COMPARED:
            raise FormatError(
                f"{len(regions)} boxes of a tensor of which too many lie beside each other along "
                f"dim {dim} to be compared: no layout cuts a tensor like that"
            )
        clash = next((r for r in active if intersect(r, region)), None)
        if clash is not None:
            return clash, region
        active.append(region)
    return None


def split(region: Region, at_most: int) -> list[Region]:
    """Split a region into slabs of at most `at_most` elements, along the outermost dims."""
    if region.numel <= at_most:
        return [region]
    dim = next(d for d, n in enumerate(region.shape) if n > 1)
    row = region.numel // region.shape[dim]
    rows = max(1, at_most // row)
    slabs = []
    for start in range(0, region.shape[dim], rows):
        count = min(rows, region.shape[dim] - start)
        offset = (*region.offset[:dim], region.offset[dim] + start, *region.offset[dim + 1 :])
        shape = (*region.shape[:dim], count, *region.shape[dim + 1 :])
        slabs.extend(split(Region(offset, shape), at_most))
    return slabs


def blocks_touched(outer: Region, inner: Region, itemsize: int, block: int) -> list[range]:
    """Return which blocks of `block` bytes hold `inner`, where `outer` is stored row-major.

    Returns ranges of block numbers, in order and not adjacent. `inner` must be in `outer`.
    """
    starts = np.array([first_byte(outer, inner, itemsize)], dtype=np.int64)
    length, stride = itemsize, itemsize
    outward = []
    # From the fastest dim outwards: as long as rows follow one another they are one longer run.
    for n_outer, n_inner in zip(reversed(outer.shape), reversed(inner.shape), strict=True):
        # Steps shorter than a block skip none, so the run counts as unbroken. This keeps
        # the number of runs below the number of blocks, however thin the slices are.
        if stride <= block or length == stride:
            length += (n_inner - 1) * stride
        else:
            outward.append((n_inner, stride))
        stride *= n_outer
    for count, step in outward:
        steps = np.arange(count, dtype=np.int64) * step
        starts = (steps[:, None] + starts[None, :]).reshape(-1)
    first, last = starts // block, (starts + length - 1) // block
    return merge_ranges(map(range, first.tolist(), (last + 1).tolist()))


def first_byte(outer: Region, inner: Region, itemsize: int) -> int:
    """Return where the first element of `inner` is, where `outer` is stored row-major."""
    position = 0
    for o, n, i in zip(outer.offset, outer.shape, inner.offset, strict=True):
        position = position * n + (i - o)
    return position * itemsize


def merge_ranges(spans: Iterable[range]) -> list[range]:
    """Return the union of ranges, in order, none adjacent to the next."""
    union: list[range] = []
    for span in sorted(spans, key=lambda s: s.start):
        if union and span.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(union[-1].stop, span.stop))
        else:
            union.append(span)
    return union
