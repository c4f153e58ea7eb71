"""Regions: where elements are in a contiguous local tensor, as few strided regions as possible.

Shards that are not boxes are sent as one flat sequence of elements. Sender and receiver list the
same elements in the same order, each as regions of its own local tensor; few regions mean few
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from vescale_dtensor._layout.shard_geometry import Box, StridedBox


class Region(NamedTuple):
    """Elements of a contiguous tensor, as `as_strided` takes them; their order is row-major.

    Attributes:
        offset: index of the first element in the flattened tensor.
        shape: extents.
        strides: strides, in elements.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Regions = tuple[Region, ...]
Pair = tuple[Region, Region]


def count(regions: Regions) -> int:
    """Return the number of elements."""
    return sum(region.numel for region in regions)


def is_run(regions: Regions) -> bool:
    """Whether the elements are consecutive, so that reading or writing them is a view."""
    return len(regions) == 1 and regions[0].strides in ((), (1,))


def overlaps(old: Sequence[StridedBox], new: Sequence[StridedBox]) -> list[Pair]:
    """Return the elements that are in boxes of both: where they are in either local tensor."""
    found = []
    # The order of the pairs is the order of the message. Sender and receiver pass the same two
    # lists, so they agree on it; sorted, they can be searched.
    ordered = sorted(new)
    for cell in sorted(old):
        # Interleaved shards have many intervals, of which each meets few: those before and after
        # are skipped. Boxes of several dims can only be dropped at the end.
        for other in _from(ordered, cell) if len(cell.box) == 1 else ordered:
            if cell.box and other.box[0][0] >= cell.box[0][1]:
                break
            box = tuple(map(_intersection, cell.box, other.box))
            if all(low < high for low, high in box):
                found.append((_inside(cell, box), _inside(other, box)))
    return found


def _from(ordered: Sequence[StridedBox], cell: StridedBox) -> Iterator[StridedBox]:
    """Yield sorted intervals of one dim, from the first that ends after `cell` begins."""
    # A bisection: intervals of one dim do not overlap, so their ends are sorted like their starts.
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if ordered[middle].box[0][1] <= cell.box[0][0]:
            low = middle + 1
        else:
            high = middle
    for index in range(low, len(ordered)):
        yield ordered[index]


def _intersection(interval: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Intersect two intervals; low >= high where nothing is in both."""
    return max(interval[0], other[0]), min(interval[1], other[1])


def _inside(cell: StridedBox, box: Box) -> Region:
    """Locate a box of global indices inside `cell`, in the local tensor of `cell`."""
    steps = ((low - at[0]) * n for (low, _), at, n in zip(box, cell.box, cell.strides, strict=True))
    return Region(cell.offset + sum(steps), tuple(h - low for low, h in box), cell.strides)


def cross_product(per_group: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Combine every choice of one pair per group of dims into one pair over all dims."""
    return [
        (_joined(first for first, _ in chosen), _joined(second for _, second in chosen))
        for chosen in product(*per_group)
    ]


def _joined(parts: Iterable[Region]) -> Region:
    """Join regions of several groups into one region over all their dims."""
    offset, shape, strides = 0, (), ()  # type: tuple[int, tuple[int, ...], tuple[int, ...]]
    for part in parts:
        offset, shape = offset + part.offset, shape + part.shape
        strides += part.strides
    return Region(offset, shape, strides)


def compact(regions: Iterable[Region]) -> Regions:
    """Return the same elements, in the same order, in fewer regions."""
    found = [_folded(region) for region in regions if region.numel]
    # Each pass may make new neighbours for the next one. The number of regions falls each time, so
    # it ends.
    while True:
        fewer = list(_chained(list(_appended(found))))
        if len(fewer) == len(found):
            return tuple(fewer)
        found = fewer


def _folded(region: Region) -> Region:
    """Drop dims of extent one, and join neighbouring dims that are one run."""
    shape: list[int] = []
    strides: list[int] = []
    for extent, stride in zip(region.shape, region.strides, strict=True):
        if extent == 1:
            continue
        # The outer dim steps by exactly the length of the inner one.
        if shape and strides[-1] == extent * stride:
            shape[-1], strides[-1] = shape[-1] * extent, stride
        else:
            shape.append(extent)
            strides.append(stride)
    return Region(region.offset, tuple(shape), tuple(strides))


def _appended(regions: Iterable[Region]) -> Iterator[Region]:
    """Join a region to the one before, where it begins at that one's end with the same strides."""
    last: Region | None = None
    for region in regions:
        # A single element has no dims after folding; give it one, so that it can grow.
        one = region if region.shape else Region(region.offset, (1,), (1,))
        if last is None:
            last = one
        elif one.strides == last.strides and _end(last) == (one.offset, one.shape[1:]):
            last = last._replace(shape=(last.shape[0] + one.shape[0], *last.shape[1:]))
        else:
            yield _folded(last)
            last = one
    if last is not None:
        yield _folded(last)


def _end(region: Region) -> tuple[int, tuple[int, ...]]:
    """Where a region would go on, and the inner extents that its continuation must have."""
    return region.offset + region.shape[0] * region.strides[0], region.shape[1:]


def _chained(regions: Sequence[Region]) -> Iterator[Region]:
    """Join regions of equal shape at equal distances into one with one more dim."""
    at = 0
    while at < len(regions):
        first, end = regions[at], at + 1
        while end < len(regions) and _continues(regions, at, end):
            end += 1
        if end == at + 1:
            yield first
        else:
            # The distance between the first two; `_continues` has checked it for the others.
            step = regions[at + 1].offset - first.offset
            longer = Region(first.offset, (end - at, *first.shape), (step, *first.strides))
            yield _folded(longer)
        at = end


def _continues(regions: Sequence[Region], first: int, at: int) -> bool:
    """Whether region `at` continues the sequence that begins at `first`."""
    a, b = regions[first], regions[at]
    if (a.shape, a.strides) != (b.shape, b.strides):
        return False
    step = regions[first + 1].offset - a.offset
    # Positive only: `as_strided` takes no negative strides, and stride 0 would repeat elements.
    return step > 0 and b.offset - a.offset == (at - first) * step
