"""Intervals of indices: what coordinates own of a dim that is divided over them.

`placements` says how; here are the divisions that several placements share.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
"""Intervals in local order. An empty one occurs only alone, where nothing is owned."""


def consecutive(sizes: Sequence[int]) -> tuple[Intervals, ...]:
    """Return one interval per size, one after the other."""
    ends = list(accumulate(sizes, initial=0))
    return tuple([(interval,) for interval in pairwise(ends)])


def chunk(extent: int, count: int, index: int) -> Interval:
    """Return the interval of chunk `index` where `torch.chunk` divides `extent` into `count`."""
    piece = -(-extent // count)
    return min(extent, index * piece), min(extent, (index + 1) * piece)


def in_blocks(blocks: Sequence[int], count: int) -> tuple[Intervals, ...]:
    """Divide each block over `count` coordinates; return what each of them owns of all blocks."""
    return tuple(in_each_block(blocks, count, index) for index in range(count))


def in_each_block(blocks: Sequence[int], count: int, index: int) -> Intervals:
    """Divide each block over `count` coordinates; return what one of them owns of all blocks."""
    owned: list[Interval] = []
    start = 0
    for block in blocks:
        low, high = chunk(block, count, index)
        owned.append((start + low, start + high))
        start += block
    # Merged, so that a coordinate whose parts touch has one interval, as an even shard has.
    return merged(owned)


def merged(intervals: Sequence[Interval]) -> Intervals:
    """Return the same elements in the same order in the fewest intervals, but at least in one."""
    result: list[Interval] = []
    for low, high in intervals:
        if low == high:
            continue
        if result and result[-1][1] == low:
            result[-1] = (result[-1][0], high)
        else:
            result.append((low, high))
    # An empty shard keeps one empty interval, so that it has a start to be sliced at like any
    # other.
    return tuple(result) if result else tuple(intervals[:1])
