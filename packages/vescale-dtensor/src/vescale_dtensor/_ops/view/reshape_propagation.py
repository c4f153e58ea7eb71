"""Propagates shards through a reshape: the placement of the new dims that moves no element.

Both shapes fall into groups of dims with equal products. Within a group the old dims are merged
into one, which is split into the new dims; a shard that both the merged dim and the new dims can
express stays. An inner axis shards what an outer one left, whose extent may differ by coordinate:
its shard stays only if one placement serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from vescale_dtensor._layout.derived_placements import on_dim, split_of
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    is_flat,
)

# More interleaved blocks are costly to plan with, and sending them is no faster than a gather.
_MOST_BLOCKS = 4096

Extents = set[int]
"""Extents of a dim that the axes seen so far leave to their coordinates, without 0."""


class ReshapeGroup(NamedTuple):
    """Dims on either side that hold the same elements; dims of extent one are in no group."""

    source: tuple[int, ...]
    target: tuple[int, ...]


def reshape_groups(source: Shape, target: Shape) -> list[ReshapeGroup]:
    """The groups of two shapes with the same number of elements, which is not 0."""
    # Dims of extent one have no elements to order: any number may come or go anywhere.
    left = [d for d, n in enumerate(source) if n != 1]
    right = [d for d, n in enumerate(target) if n != 1]
    found: list[ReshapeGroup] = []
    while left and right:
        first, second = [left.pop(0)], [right.pop(0)]
        # Neither list runs out in here: the totals are equal, so the smaller side has dims left.
        while (a := prod(source[d] for d in first)) != (b := prod(target[d] for d in second)):
            if a < b:
                first.append(left.pop(0))
            else:
                second.append(right.pop(0))
        found.append(ReshapeGroup(tuple(first), tuple(second)))
    return found


def reshape_placements(layout: Layout, source: Shape, target: Shape) -> tuple[Placement, ...]:
    """For each axis the placement of the reshaped tensor; `Replicate` where a shard cannot stay."""
    if tuple(source) == tuple(target):
        return layout.placements
    passages = [
        _GroupPropagation(group, source, target) for group in reshape_groups(source, target)
    ]
    result: list[Placement] = []
    stopped: set[int] = set()
    owned: list[int] = []
    # From the outermost axis inwards: an inner one shards what the outer ones leave.
    for axis, (placement, count) in enumerate(zip(layout.placements, layout.sizes, strict=True)):
        if not isinstance(placement, Sharded):
            result.append(placement)
            continue
        shard: Placement | None = None
        dims = placement.cut_dims()
        if stopped.isdisjoint(dims):
            passage = next((p for p in passages if dims[0] in p.group.source), None)
            if passage is not None:
                alone = _is_only_axis(axis, layout.placements, passage.group.source)
                shard = passage.through(placement, count, alone)
            elif len(dims) == 1:
                owned.append(axis)
        if shard is None:
            # Once an outer axis gathers a dim, an inner shard of it would shard other extents.
            stopped.update(dims)
        result.append(Replicate() if shard is None else shard)
    for axis in owned:
        # A dim of extent one is in no group: all elements are at one coordinate, and stay there.
        placement = layout.placements[axis]
        assert isinstance(placement, Sharded)
        result[axis] = owner_shard(placement.sizes(1, layout.sizes[axis]), result, len(target))
    return tuple(result)


def owner_shard(owner: Sequence[int], others: Iterable[Placement], ndim: int) -> Placement:
    """The shard that gives everything to the coordinate whose unit is one, beside other shards.

    `Replicate` where no dim can be sharded further.
    """
    shard = [p for p in others if isinstance(p, Sharded)]
    flat = {dim for p in shard if is_flat(p) for dim in p.cut_dims()}
    sharded = {dim for p in shard for dim in p.cut_dims()}
    free = [dim for dim in range(ndim) if dim not in flat]
    # A dim that no axis shards, if there is one: some rules accept one shard per dim only.
    chosen = min(free, key=lambda dim: dim in sharded, default=None)
    return Replicate() if chosen is None else RaggedShard((chosen,), owner)


def _is_only_axis(axis: int, placements: Sequence[Placement], dims: Iterable[int]) -> bool:
    """Whether no other axis shards these dims."""
    wanted = set(dims)
    others = (p for a, p in enumerate(placements) if a != axis and isinstance(p, Sharded))
    return all(wanted.isdisjoint(p.cut_dims()) for p in others)


class _GroupPropagation:
    """Follows the shards of one group of dims, axis by axis from the outermost."""

    def __init__(self, group: ReshapeGroup, source: Shape, target: Shape) -> None:
        self.group = group
        # Changed by `through`, axis by axis, so that each sees the extents that outer axes leave.
        self._before: list[Extents] = [{source[d]} - {0} for d in group.source]
        self._after: list[Extents] = [{target[d]} - {0} for d in group.target]

    def through(self, placement: Sharded, count: int, alone: bool) -> Placement | None:
        """The placement behind the reshape; None, and nothing is followed, if there is none."""
        source, target = self.group
        if is_flat(placement):
            if placement.cut_dims() != source or not alone:
                return None
            return (
                on_dim(placement, target[0])
                if _spans(target, len(source))
                else self._flat(placement, count)
            )
        place = source.index(placement.cut_dims()[0])
        # Two steps, through one dim: what it was before, and what it is of the new dims.
        merged = _merged(placement, self._before, place, count)
        if merged is None:
            return None
        # Coordinates of outer axes may have different extents: all of them have to agree.
        extents = {n for n in map(prod, product(*self._before))}
        found = _split(merged, extents, self._after, count)
        if found is None:
            # A shard of all new dims flattened can have any boundary, but no second axis.
            return self._flat(merged, count) if alone else None
        shard, into = found
        # Only now: a shard that is gathered leaves inner axes the extents that it found.
        self._before[place] = _remaining_extents(placement, self._before[place], count)
        self._after[into] = _remaining_extents(shard, self._after[into], count)
        return on_dim(shard, target[into])

    def _flat(self, merged: Sharded, count: int) -> Placement | None:
        """The shard of all new dims flattened."""
        if not isinstance(merged, Shard | RaggedShard):
            return None
        whole = prod(n for extents in self._before for n in extents)
        first, last = self.group.target[0], self.group.target[-1]
        return RaggedShard(range(first, last + 1), merged.sizes(whole, count))


def _spans(target: tuple[int, ...], count: int) -> bool:
    return len(target) == count and target[-1] - target[0] == count - 1


def _remaining_extents(placement: Sharded, extents: Extents, count: int) -> Extents:
    # A coordinate that holds nothing agrees with any placement.
    return {size for n in extents for size in placement.distinct_sizes(n, count)} - {0}


def _merged(placement: Sharded, dims: list[Extents], place: int, count: int) -> Sharded | None:
    """The shard of one of several dims as a shard of these dims merged; None if there is none."""
    if len(dims) == 1:
        return on_dim(placement, 0)
    outer = {prod(chosen) for chosen in product(*dims[:place])}
    inner = {prod(chosen) for chosen in product(*dims[place + 1 :])}
    extents = dims[place]
    # The outermost dim: its shards are intervals of the merged dim, each index `inner` wide.
    if outer == {1}:
        if isinstance(placement, Shard):
            ways = {
                split_of(0, [size * n for size in placement.sizes(extent, count)])
                for extent in extents
                for n in inner
            }
            return ways.pop() if len(ways) == 1 else None
        if isinstance(placement, RaggedShard):
            return on_dim(placement, 0)
    # An inner dim: every index of the outer dims repeats its shards, as interleaved blocks.
    blocks = _blocks(placement, extents, count)
    if len(outer) != 1 or blocks is None:
        return None
    (repeats,) = outer
    # A shard of indices, each `n` elements wide: uneven ones may round to other boundaries.
    scale = all(_scales(extent // blocks, n, count) for extent in extents for n in inner)
    if not scale or repeats * blocks > _MOST_BLOCKS:
        return None
    return Shard(0) if repeats * blocks == 1 else InterleavedShard(0, repeats * blocks)


def _blocks(placement: Sharded, extents: Extents, count: int) -> int | None:
    """The number of equal blocks, each divided as by `Shard`, into which a shard divides a dim."""
    if isinstance(placement, Shard):
        return 1
    if isinstance(placement, InterleavedShard):
        # Unequal blocks are split and merged by nobody: the slices that make them equal come first.
        return placement.blocks if isinstance(placement.blocks, int) else None
    if isinstance(placement, StridedShard):
        even = all(extent % placement.split_factor == 0 for extent in extents)
        return placement.split_factor if even else None
    even = all(placement.sizes(n, count) == Shard(0).sizes(n, count) for n in extents)
    return 1 if even else None


def _scales(extent: int, factor: int, count: int) -> bool:
    """Whether `Shard` divides `extent * factor` at the same places as `extent`."""
    sizes = Shard(0).sizes(extent, count)
    return tuple(size * factor for size in sizes) == Shard(0).sizes(extent * factor, count)


def _split(
    shard: Sharded, whole: Extents, dims: list[Extents], count: int
) -> tuple[Sharded, int] | None:
    """The shard of one dim as that of one of the dims into which it is split, and of which."""
    if len(dims) == 1:
        return shard, 0
    if isinstance(shard, RaggedShard):
        return _outermost(shard, whole, dims, count)
    blocks = _blocks(shard, whole, count)
    if blocks is None:
        return None
    # Outer dims that the blocks fill entirely; the shard is then of the next one.
    outer, into = 1, 0
    while into < len(dims) - 1 and len(dims[into]) == 1:
        (extent,) = dims[into]
        if blocks % (outer * extent):
            break
        outer, into = outer * extent, into + 1
    left = blocks // outer  # blocks that the dim itself has to have
    if blocks % outer or any(extent % left for extent in dims[into]):
        return None
    inner = {prod(chosen) for chosen in product(*dims[into + 1 :])}
    ways = {_slices(extent // left, n, count) for extent in dims[into] for n in inner}
    if None in ways or not ways:
        return None
    if left == 1:
        found = {split_of(0, sizes) for sizes in ways if sizes is not None}
        return (found.pop(), into) if len(found) == 1 else None
    even = all(sizes == Shard(0).sizes(sum(sizes), count) for sizes in ways if sizes is not None)
    return (InterleavedShard(0, left), into) if even else None


def _outermost(
    shard: RaggedShard, whole: Extents, dims: list[Extents], count: int
) -> tuple[Sharded, int] | None:
    inner = {prod(chosen) for chosen in product(*dims[1:])}
    # No boundary may be inside an index of the outermost of the new dims.
    if any(size % n for extent in whole for size in shard.sizes(extent, count) for n in inner):
        return None
    return shard, 0


def _slices(extent: int, inner: int, count: int) -> tuple[int, ...] | None:
    """Sizes of `extent` under a shard of `extent * inner`, if no boundary is inside an index."""
    sizes = Shard(0).sizes(extent * inner, count)
    if any(size % inner for size in sizes):
        return None
    return tuple(size // inner for size in sizes)


def repeat_placements(
    layout: Layout, shape: Shape, dim: int, repeats: int
) -> tuple[Placement, ...]:
    """For each axis the placement after every index of `dim` is repeated in place."""
    extents: Extents = {shape[dim]} - {0}
    result: list[Placement] = []
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded) or dim not in placement.cut_dims():
            result.append(placement)
            continue
        shard = None if is_flat(placement) else _merged(placement, [extents, {repeats}], 0, count)
        if shard is None:
            # All shards of the dim at once: an inner one without the outer one would have other
            # extents.
            return tuple(Replicate() if _shards(p, dim) else p for p in layout.placements)
        extents = _remaining_extents(placement, extents, count)
        result.append(on_dim(shard, dim))
    return tuple(result)


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Sharded) and dim in placement.cut_dims()
