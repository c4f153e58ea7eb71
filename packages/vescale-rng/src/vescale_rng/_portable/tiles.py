"""Splits local boxes into tiles of bounded size, grids of runs that are contiguous globally."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from vescale_rng._layout.layout import Box, Ints, ShardLayout, dense_strides


@dataclass(frozen=True)
class Tile:
    """A box of the global tensor as a grid of runs.

    Attributes:
        start: place of its first element in global memory.
        sizes: extents of the grid, slow to fast; the last one is the length of the runs.
        strides: of the grid in global memory; the last is 1.
        local_offset: where the first element is in the local tensor.
        local_strides: the grid's strides there.
    """

    start: int
    sizes: Ints
    strides: Ints
    local_offset: int
    local_strides: Ints

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the tile's elements in a local tensor, as a view of the grid's shape."""
        place = local.storage_offset() + self.local_offset
        return local.as_strided(self.sizes, self.local_strides, place)


@lru_cache(maxsize=4096)
def tiles_of(layout: ShardLayout) -> tuple[Tile, ...]:
    """Make one tile for each box with elements, of any size; `cut_tile` makes them small."""
    order = layout.memory_order or tuple(range(len(layout.global_shape)))
    strides = dense_strides(layout.global_shape, layout.memory_order)
    return tuple(_tile(box, order, strides) for box in layout.boxes if 0 not in box.shape)


def _tile(box: Box, order: Ints, strides: Ints) -> Tile:
    dims = [(box.shape[d], strides[d], box.local_strides[d]) for d in order if box.shape[d] > 1]
    merged: list[tuple[int, int, int]] = []
    for size, stride, local in dims:
        # Two dims that step alike on both sides are one: longer runs, fewer dims.
        if merged and merged[-1][1] == size * stride and merged[-1][2] == size * local:
            size *= merged.pop()[0]
        merged.append((size, stride, local))
    # Runs are contiguous by definition; strided elements are runs of one.
    if not merged or merged[-1][1] != 1:
        merged.append((1, 1, 1))
    sizes, global_strides, local_strides = zip(*merged, strict=True)
    start = sum(o * s for o, s in zip(box.global_offset, strides, strict=True))
    return Tile(start, sizes, global_strides, box.local_offset, local_strides)


def cut_tile(tile: Tile, most: int, unit: int) -> Iterator[Tile]:
    """Split `tile` into tiles of at most `most` elements, along the fewest dims.

    Args:
        tile: of any size.
        most: a multiple of `unit`.
        unit: the elements of a block: a run is split where a block begins, so that no block is
            computed twice.
    """
    if prod(tile.sizes) <= most:
        yield tile
        return
    # The slowest dim whose inner part fits is the one that is split.
    dim = 0
    while prod(tile.sizes[dim + 1 :]) > most:
        dim += 1
    inner = prod(tile.sizes[dim + 1 :])
    step = most // inner
    for outer in _indices(tile.sizes[:dim]):
        begin = 0
        while begin < tile.sizes[dim]:
            end = begin + step
            if dim == len(tile.sizes) - 1:
                end -= (tile.start + _dot(outer, tile.strides) + end) % unit
            end = min(end, tile.sizes[dim])
            yield _part(tile, (*outer, begin), end - begin)
            begin = end


def split_outer(tile: Tile, dims: int) -> Iterator[Tile]:
    """Split `tile` into tiles of at most `dims` dims before the runs."""
    extra = max(0, len(tile.sizes) - 1 - dims)
    for outer in _indices(tile.sizes[:extra]):
        yield Tile(
            tile.start + _dot(outer, tile.strides),
            tile.sizes[extra:],
            tile.strides[extra:],
            tile.local_offset + _dot(outer, tile.local_strides),
            tile.local_strides[extra:],
        )


def _part(tile: Tile, first: Ints, extent: int) -> Tile:
    dim = len(first) - 1
    return Tile(
        tile.start + _dot(first, tile.strides),
        (extent, *tile.sizes[dim + 1 :]),
        tile.strides[dim:],
        tile.local_offset + _dot(first, tile.local_strides),
        tile.local_strides[dim:],
    )


def _indices(sizes: Ints) -> Iterator[Ints]:
    # As itertools.product, which would first make a tuple of every range.
    if not sizes:
        yield ()
        return
    for outer in _indices(sizes[:-1]):
        for index in range(sizes[-1]):
            yield (*outer, index)


def _dot(indices: Ints, strides: Ints) -> int:
    # Not strict: dims after those that an index is given for begin at 0.
    return sum(index * stride for index, stride in zip(indices, strides, strict=False))
