"""Shard geometry: which elements a coordinate owns, and how they are stored in its local tensor.

The dims of a tensor fall into groups. Most groups are one dim, of which a coordinate owns some
intervals, one after the other. Where a placement shards several dims as one, these are one group: a
coordinate owns one interval of their row-major flattening, and the local tensor has one dim in
their place. Everything is stated per group, so a tensor of many dims is as simple as one of few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.intervals import Interval, Intervals, merged
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import RaggedShard, is_flat

Box = tuple[Interval, ...]
Dims = tuple[int, ...]


class DimGroup(NamedTuple):
    """What is owned of consecutive dims that are one dim of the local tensor.

    Attributes:
        dims: dims of the global tensor.
        intervals: for each of them, the intervals that placements of single dims have left.
        span: of the row-major flattening of these, the interval that flat placements have left.
    """

    dims: Dims
    intervals: tuple[Intervals, ...]
    span: Interval

    @property
    def extent(self) -> int:
        """Extent of the local dim."""
        return self.span[1] - self.span[0]


class StridedBox(NamedTuple):
    """A box of elements that are evenly spaced in the local tensor.

    Attributes:
        box: intervals of the global dims.
        offset: index of its first element in the local dim (or tensor).
        strides: distance between neighbours along each dim of the box.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]


def dim_groups(placements: Sequence[Placement], ndim: int) -> tuple[Dims, ...]:
    """Group the dims of a tensor: those together that some placement shards as one.

    Raises:
        LayoutError: a dim that is sharded as one with others, and differently by a later axis.
    """
    # Each dim starts as a group of its own; a flat placement names all its dims by the first.
    first_of = {dim: dim for dim in range(ndim)}
    flat: dict[int, RaggedShard] = {}
    for placement in placements:
        if not isinstance(placement, Sharded):
            continue
        dims = placement.cut_dims()
        for dim in dims:
            # After a flat placement the local tensor has no such dims any more; only the same
            # flattening can be sharded further. Before one, single dims may be sharded.
            outer = flat.get(dim)
            if outer is not None and outer.dims != dims:
                raise LayoutError(
                    f"{placement} on a later mesh axis than {outer}: what the latter leaves has no "
                    f"dim {dim} of its own. Cut the same dims {outer.dims}, or cut dim {dim} on an "
                    "earlier axis."
                )
            if isinstance(placement, RaggedShard) and is_flat(placement):
                flat[dim] = placement
                first_of[dim] = dims[0]
    return tuple(
        tuple(dim for dim in range(ndim) if first_of[dim] == first)
        for first in range(ndim)
        if first_of[first] == first
    )


def unsharded(dims: Dims, shape: Sequence[int]) -> DimGroup:
    """Return a group of some dims of which everything is owned."""
    intervals = tuple(((0, shape[dim]),) for dim in dims)
    return DimGroup(dims, intervals, (0, prod(shape[dim] for dim in dims)))


# Few: each result is as long as the world. Whoever asks for one coordinate after the other, as a
# picture of all shards does, would compute all of them each time.
@lru_cache(maxsize=8)
def shard(group: DimGroup, placement: Sharded, count: int) -> tuple[DimGroup, ...]:
    """Return what each of `count` coordinates owns once `placement` shards what `group` leaves."""
    pieces = placement.pieces(_remaining(group, placement), count)
    return tuple(_part(group, placement, piece) for piece in pieces)


def shard_at(group: DimGroup, placement: Sharded, count: int, index: int) -> DimGroup:
    """Return what coordinate `index` owns of what `shard` gives; no other is looked at."""
    return _part(group, placement, placement.piece(_remaining(group, placement), count, index))


def _remaining(group: DimGroup, placement: Sharded) -> int:
    """Return how much a group has left of what `placement` shards."""
    if is_flat(placement):
        return group.extent
    return _length(group.intervals[group.dims.index(placement.cut_dims()[0])])


def _part(group: DimGroup, placement: Sharded, piece: Intervals) -> DimGroup:
    """Return the part of a group that has this `piece` of what `placement` shards."""
    if is_flat(placement):
        # Flat placements divide the span and leave the intervals: flattening came after these.
        low, _ = group.span
        ((start, end),) = piece
        return group._replace(span=(low + start, low + end))
    position = group.dims.index(placement.cut_dims()[0])
    # Counted within what is left: positions in the concatenated intervals, not global indices.
    return _with_intervals(group, position, intervals_at(group.intervals[position], piece))


def shard_unclipped(
    group: DimGroup, placement: Sharded, extent: int, count: int
) -> tuple[DimGroup, ...]:
    """Like `shard`, but `placement` divides the full dim of `extent`, whatever is left of it.

    A coordinate owns the intersection of its part of the dim with what `group` has left, which may
    be nothing.
    """
    position = group.dims.index(placement.cut_dims()[0])
    intervals = group.intervals[position]
    return tuple(
        _with_intervals(group, position, merged(_intersection(intervals, piece)))
        for piece in placement.pieces(extent, count)
    )


def _intersection(intervals: Intervals, others: Intervals) -> list[Interval]:
    """Intersect two sequences of intervals; a single empty interval where nothing is in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in intervals for c, d in others)
    # The empty interval is inside the first of `intervals`, so that it can be sliced at.
    return [pair for pair in pairs if pair[0] < pair[1]] or [(intervals[0][0], intervals[0][0])]


def _with_intervals(group: DimGroup, position: int, intervals: Intervals) -> DimGroup:
    """Replace the intervals of one dim of a group, and let its span be everything again."""
    # Single dims are only sharded before flat placements (`dim_groups` refuses the rest), so no
    # span is lost here.
    every = (*group.intervals[:position], intervals, *group.intervals[position + 1 :])
    return DimGroup(group.dims, every, (0, prod(map(_length, every))))


def _length(intervals: Intervals) -> int:
    """Number of indices in some intervals."""
    return sum(high - low for low, high in intervals)


def intervals_at(intervals: Intervals, wanted: Intervals) -> Intervals:
    """Return the parts of `intervals` at positions `wanted` of their concatenation."""
    if len(intervals) == 1:  # nearly always, and asked for every rank
        start = intervals[0][0]
        return tuple([(start + low, start + high) for low, high in wanted])
    return merged([part for low, high in wanted for part, _ in _clipped(intervals, low, high)])


def _clipped(intervals: Intervals, low: int, high: int) -> Iterator[tuple[Interval, int]]:
    """Yield the parts of `intervals` at `low` to `high` of their concatenation, and positions."""
    at = 0
    for start, end in intervals:
        length = end - start
        first, last = max(low - at, 0), min(high - at, length)
        # An empty request keeps one empty interval, at the first place that it fits.
        if first < last or (low == high and 0 <= low - at <= length):
            yield (start + first, start + last), at + first
            if low == high:
                return
        at += length


def strided_boxes(group: DimGroup) -> tuple[StridedBox, ...]:
    """Return the boxes that a group consists of, with offsets and strides in its local dim."""
    extents = [_length(intervals) for intervals in group.intervals]
    strides = tuple(prod(extents[i + 1 :]) for i in range(len(extents)))
    found = []
    # The span is a stretch of the flattened intervals. First it becomes boxes of positions, then
    # each position range becomes the global intervals that it covers.
    for local in rectangles(extents, group.span):
        per_dim = [list(_clipped(r, *part)) for r, part in zip(group.intervals, local, strict=True)]
        for chosen in product(*per_dim):
            position = sum(at * n for (_, at), n in zip(chosen, strides, strict=True))
            box = tuple(interval for interval, _ in chosen)
            found.append(StridedBox(box, position - group.span[0], strides))
    return tuple(found)


def rectangles(extents: Sequence[int], span: Interval) -> list[Box]:
    """Divide a stretch of the flattening of `extents` into boxes: at most 2k - 1 for k dims."""
    low, high = span
    if low >= high:
        return []
    if len(extents) == 1:
        return [(span,)]
    row = prod(extents[1:])
    first, last = low // row, (high - 1) // row
    if first == last:
        return _in_row(first, extents, (low, high))
    # An incomplete first row, complete rows as one box, and an incomplete last row.
    head = _in_row(first, extents, (low, (first + 1) * row)) if low % row else []
    tail = _in_row(last, extents, (last * row, high)) if high % row else []
    middle = (first + bool(head), last + 1 - bool(tail))
    if middle[0] == middle[1]:
        return head + tail
    return [*head, (middle, *((0, n) for n in extents[1:])), *tail]


def _in_row(row: int, extents: Sequence[int], span: Interval) -> list[Box]:
    """Divide a stretch inside one row, in the remaining dims."""
    start = row * prod(extents[1:])
    inner = rectangles(extents[1:], (span[0] - start, span[1] - start))
    return [((row, row + 1), *box) for box in inner]


def check_fits(placements: Sequence[Placement], sizes: Sequence[int], shape: Sequence[int]) -> None:
    """Check that every placement fits what earlier ones leave, on every coordinate.

    All ranks ask this of all coordinates, so all of them raise or none does.

    Raises:
        LayoutError: a placement that does not fit the shape.
    """
    for dims in dim_groups(placements, len(shape)):
        # Extents alone decide whether a shard fits, and coordinates have few different ones: these
        # sets stay small on any mesh.
        per_dim: dict[int, set[int]] = {dim: {shape[dim]} for dim in dims}
        flat: set[int] | None = None
        for placement, count in zip(placements, sizes, strict=True):
            if not isinstance(placement, Sharded) or placement.cut_dims()[0] not in dims:
                continue
            if is_flat(placement):
                # At the first flat placement: all combinations of extents. Different axes shard
                # different dims, so each of them occurs.
                extents = flat if flat is not None else set(map(prod, product(*per_dim.values())))
                flat = _remaining_extents(placement, extents, count)
            else:
                (dim,) = placement.cut_dims()
                per_dim[dim] = _remaining_extents(placement, per_dim[dim], count)


def _remaining_extents(placement: Sharded, extents: set[int], count: int) -> set[int]:
    """Return the extents that a placement leaves; it raises where it does not fit."""
    return {size for extent in extents for size in placement.distinct_sizes(extent, count)}


def owned(
    placements: Sequence[Placement],
    sizes: Sequence[int],
    shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[DimGroup, ...]:
    """Return what `coordinate` owns of a tensor of global `shape`, by group of dims.

    Axes shard in mesh order: a later axis divides what an earlier one left. `check_fits` says
    whether every coordinate's shards fit; here only those on the way to `coordinate` are seen.
    """
    groups = {dims: unsharded(dims, shape) for dims in dim_groups(placements, len(shape))}
    for placement, count, index in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Sharded):
            # A placement's dims are all in one group, so the first dim finds it.
            dims = next(d for d in groups if placement.cut_dims()[0] in d)
            groups[dims] = shard_at(groups[dims], placement, count, index)
    return tuple(groups.values())
