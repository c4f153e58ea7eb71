"""Ownership maps: which coordinate owns which elements, per group of dims.

Ownership is a product over groups of dims (see `_layout/shard_geometry.py`), and within a group it
depends only on the axes that shard it. So questions about all ranks are answered per group, over
the few coordinates that matter to it. The answers are the same on every rank, which is what lets
all ranks decide alike without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from vescale_dtensor._layout.intervals import Interval
from vescale_dtensor._layout.layout import Shape
from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import is_interval
from vescale_dtensor._layout.shard_geometry import (
    Box,
    DimGroup,
    Dims,
    StridedBox,
    dim_groups,
    shard,
    shard_unclipped,
    strided_boxes,
    unsharded,
)
from vescale_dtensor._layout.spec import strides_of
from vescale_dtensor._redistribute.regions import Pair, cross_product, overlaps
from vescale_dtensor._redistribute.states import Axes, AxisShards, State, UnclippedShard, shards_of


class PlanContext(NamedTuple):
    """What a plan is made for, besides placements.

    Attributes:
        sizes: extent of each mesh axis.
        shape: global shape.
        coordinate: coordinate of the rank whose plan it is.
        itemsize: bytes of an element.
    """

    sizes: tuple[int, ...]
    shape: Shape
    coordinate: Coordinate
    itemsize: int

    def members(self, axes: Axes) -> list[Coordinate]:
        """Return the coordinates of the flattened group over `axes`, in the order of the group."""
        return list(coordinates_along(self.coordinate, axes, self.sizes))


def coordinates_along(base: Coordinate, axes: Axes, sizes: tuple[int, ...]) -> Iterator[Coordinate]:
    """Yield the coordinates that differ from `base` only along `axes`, row-major over them."""
    return product(*(range(n) if a in axes else (base[a],) for a, n in enumerate(sizes)))


class OwnershipMap:
    """What every coordinate owns in some state.

    Attributes:
        sizes: extent of each mesh axis.
        shape: global shape.
        groups: the dims, grouped where several are one dim of the local tensors.
        plain: whether every coordinate owns one box, and its local tensor has all dims.
    """

    def __init__(self, state: State, frame: PlanContext) -> None:
        self.sizes = frame.sizes
        self.shape = frame.shape
        self.groups = dim_groups([state.placements[a] for a in state.order], len(frame.shape))
        self.plain = all(is_interval(p) for p in state.placements if isinstance(p, Sharded))
        self._order = state.order
        self._shards = {dims: shards_of(state, dims) for dims in self.groups}
        # Filled lazily. Per group: what the first n axes that shard it leave, by the coordinates on
        # these axes; the empty coordinate owns everything.
        self._known: dict[Dims, dict[Coordinate, DimGroup]] = {
            dims: {(): unsharded(dims, frame.shape)} for dims in self.groups
        }

    def shards(self, dims: Dims) -> AxisShards:
        """Return the axes that shard some groups of dims, and how, outermost first."""
        found = (cut for group in self._within(dims) for cut in self._shards[group])
        return tuple(sorted(found, key=lambda item: self._order.index(item[0])))

    def sharding_axes(self, dims: Dims) -> Axes:
        """Return the axes that shard some groups of dims, outermost first."""
        return tuple(axis for axis, _ in self.shards(dims))

    def _within(self, dims: Dims) -> Iterator[Dims]:
        """Groups that are in `dims`, which is always a union of groups."""
        return (group for group in self.groups if group[0] in dims)

    def owned(self, dims: Dims, coordinate: Coordinate) -> DimGroup:
        """Return what `coordinate` owns of the group of `dims`."""
        # Keyed by the coordinates on the axes that shard these dims: on a large mesh many ranks
        # share an entry.
        at = tuple([coordinate[axis] for axis, _ in self._shards[dims]])
        known = self._known[dims]
        if at not in known:
            self._fill(dims, at[:-1])
        return known[at]

    def _fill(self, dims: Dims, at: Coordinate) -> None:
        """Enter what the next axis leaves of the elements at `at`, for all its coordinates."""
        known = self._known[dims]
        if at not in known:
            self._fill(dims, at[:-1])
        # `Sharded.pieces` computes all coordinates together, and a plan asks for most of them.
        axis, placement = self._shards[dims][len(at)]
        for index, group in enumerate(self._split(known[at], placement, self.sizes[axis])):
            known[(*at, index)] = group

    def _split(self, group: DimGroup, placement: Sharded, count: int) -> tuple[DimGroup, ...]:
        """Shard a group over one axis."""
        if isinstance(placement, UnclippedShard):
            return shard_unclipped(group, placement, self.shape[placement.dim], count)
        return shard(group, placement, count)

    def local_shape(self, coordinate: Coordinate) -> Shape:
        """Return the shape of the local tensor of `coordinate`."""
        return tuple(self.owned(dims, coordinate).extent for dims in self.groups)

    def interval(self, dim: int, coordinate: Coordinate) -> Interval:
        """Return the indices of `dim` that `coordinate` owns, in a plain map."""
        return self.owned((dim,), coordinate).intervals[0][0]

    def box(self, coordinate: Coordinate) -> Box:
        """Return the box that `coordinate` owns, in a plain map."""
        return tuple(self.interval(dim, coordinate) for dim in range(len(self.shape)))

    def strided_boxes(self, dims: Dims, coordinate: Coordinate) -> list[StridedBox]:
        """Return what `coordinate` owns of some groups of dims, located in its local tensor."""
        # Plans assume contiguous, row-major local tensors; the executor makes them so.
        steps = dict(zip(self.groups, strides_of(self.local_shape(coordinate), None), strict=True))
        per_group = [
            [_scaled(cell, steps[group]) for cell in strided_boxes(self.owned(group, coordinate))]
            for group in self._within(dims)
        ]
        return [_merged(chosen) for chosen in product(*per_group)]


def _scaled(cell: StridedBox, step: int) -> StridedBox:
    """Convert offset and strides, in steps of one local dim, to elements of the local tensor."""
    return StridedBox(cell.box, cell.offset * step, tuple(n * step for n in cell.strides))


def _merged(chosen: Sequence[StridedBox]) -> StridedBox:
    """Join boxes of several groups into one box over all their dims."""
    return StridedBox(
        tuple(interval for cell in chosen for interval in cell.box),
        sum(cell.offset for cell in chosen),
        tuple(n for cell in chosen for n in cell.strides),
    )


def common_groups(old: OwnershipMap, new: OwnershipMap) -> list[Dims]:
    """Return the finest grouping of dims whose groups are unions of groups of both maps."""
    result: list[Dims] = []
    for dims in sorted((*old.groups, *new.groups)):
        # Groups are runs of consecutive dims, so overlapping ones join into one interval of dims.
        if result and dims[0] <= result[-1][-1]:
            result[-1] = tuple(range(result[-1][0], max(result[-1][-1], dims[-1]) + 1))
        else:
            result.append(dims)
    return result


def shared_elements(
    old: OwnershipMap, source: Coordinate, new: OwnershipMap, target: Coordinate
) -> list[Pair]:
    """Return the elements that `source` owns in `old` and `target` owns in `new`.

    The order of the elements depends on the arguments alone, so sender and receiver agree on it and
    no index has to be sent.

    Returns:
        Pairs of regions: where the elements are in the local tensor of `source`, and in that of
        `target`.
    """
    return cross_product(
        [
            overlaps(old.strided_boxes(dims, source), new.strided_boxes(dims, target))
            for dims in common_groups(old, new)
        ]
    )


def same_ownership(old: OwnershipMap, new: OwnershipMap) -> bool:
    """Whether every coordinate owns the same elements in both maps, in the same local order."""
    # Equal shards are equal ownership. Others may be, too (an interleaved shard of one block).
    return old.groups == new.groups and all(
        old.shards(dims) == new.shards(dims)
        or all(
            strided_boxes(old.owned(dims, c)) == strided_boxes(new.owned(dims, c))
            for c in _relevant(old, new, dims)
        )
        for dims in old.groups
    )


def axes_needed(old: OwnershipMap, new: OwnershipMap) -> Axes:
    """Return the fewest axes whose groups hold, in `old`, all that their members own in `new`.

    Only axes that shard in `old` are among them, so no two members of such a group hold the same
    element: which member sends an element is never a choice.
    """
    needed = {axis for dims in common_groups(old, new) for axis in _needed_along(dims, old, new)}
    # Sorted, as a flattened group orders its members by ascending axes.
    return tuple(sorted(axis for axis in needed if old.sizes[axis] > 1))


def _needed_along(dims: Dims, old: OwnershipMap, new: OwnershipMap) -> Axes:
    """The axes that `axes_needed` finds for one group of dims."""
    before, after = old.shards(dims), new.shards(dims)
    # Nearly always one list of shards continues the other, and no coordinate has to be looked at:
    # new inner shards are slices of what is there, and undone inner shards are gathered.
    if after[: len(before)] == before:
        return ()
    sharding = old.sharding_axes(dims)
    if before[: len(after)] == after:
        return sharding[len(after) :]
    # Subsets by size, so the first that suffices is a smallest one; there are as many as subsets of
    # the axes that shard these dims, which is few.
    fewer = (axes for count in range(len(sharding)) for axes in combinations(sharding, count))
    relevant = list(_relevant(old, new, dims))
    # All these axes together own all of the dims, so the last choice needs no check.
    return next((axes for axes in fewer if _suffice(axes, dims, old, new, relevant)), sharding)


def _suffice(
    axes: Axes, dims: Dims, old: OwnershipMap, new: OwnershipMap, relevant: list[Coordinate]
) -> bool:
    """Whether every group over `axes` holds what its members own in `new`."""
    for coordinate in relevant:
        wanted = new.strided_boxes(dims, coordinate)
        found = (
            old.strided_boxes(dims, member)
            for member in coordinates_along(coordinate, axes, old.sizes)
        )
        # What the members hold is disjoint, so what they cover together is the sum of what each
        # covers.
        covered = sum(
            part.numel for owned_boxes in found for part, _ in overlaps(owned_boxes, wanted)
        )
        if covered != sum(prod(high - low for low, high in cell.box) for cell in wanted):
            return False
    return True


def _relevant(old: OwnershipMap, new: OwnershipMap, dims: Dims) -> Iterator[Coordinate]:
    """Coordinates that stand for all others: they differ on axes that shard these dims."""
    return coordinates_along(
        (0,) * len(old.sizes), old.sharding_axes(dims) + new.sharding_axes(dims), old.sizes
    )


def overlap(box: Box, other: Box) -> Box:
    """Return the part of `box` inside `other`; where there is none, an empty interval of `box`."""
    return tuple(map(_clamped, box, other))


def _clamped(interval: Interval, other: Interval) -> Interval:
    """The overlap of two intervals, as an interval inside the first."""
    # Clamped into the interval, so that an empty part has a legal start to slice at.
    low = min(max(interval[0], other[0]), interval[1])
    return low, max(low, min(interval[1], other[1]))


def offset(box: Box, inside: Box) -> Shape:
    """Return the start of `box`, counted from the start of `inside`."""
    return tuple(low - origin for (low, _), (origin, _) in zip(box, inside, strict=True))
