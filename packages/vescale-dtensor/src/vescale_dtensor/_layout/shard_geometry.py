"""What a coordinate holds of a tensor: which elements, and how they lie in its local tensor.

The dims of a tensor fall into groups. Most groups are one dim, and what is held of it are some
intervals, one after the other. Where a placement cuts several dims as one, they are one group: what
is held of them is one stretch of their row-major flattening, and the local tensor has one dim in
their place. Everything is stated per group, so a tensor of many dims is as simple as one of few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.placements import (
    Interval,
    Placement,
    RaggedShard,
    Runs,
    Sharded,
    is_flat,
    merged,
)

Box = tuple[Interval, ...]
Dims = tuple[int, ...]


class Group(NamedTuple):
    """What is held of consecutive dims that are one dim of the local tensor.

    Attributes:
        dims: of the global tensor.
        runs: of each of them, the intervals that cuts of single dims have left.
        span: of the row-major flattening of these, what cuts of all dims as one have left.
    """

    dims: Dims
    runs: tuple[Runs, ...]
    span: Interval

    @property
    def extent(self) -> int:
        """Extent of the local dim."""
        return self.span[1] - self.span[0]


class Cell(NamedTuple):
    """A box of elements that lie regularly in the local tensor.

    Attributes:
        box: intervals of the global dims.
        offset: where its first element lies.
        strides: how far apart neighbours along each of its dims lie.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]


def dim_groups(placements: Sequence[Placement], ndim: int) -> tuple[Dims, ...]:
    """The dims of a tensor, those together that some placement cuts as one.

    Raises:
        LayoutError: a dim that is cut as one with others, and otherwise by a later axis.
    """
    first_of = {dim: dim for dim in range(ndim)}
    flat: dict[int, RaggedShard] = {}
    for placement in placements:
        if not isinstance(placement, Sharded):
            continue
        dims = placement.cut_dims()
        for dim in dims:
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


def whole(dims: Dims, shape: Sequence[int]) -> Group:
    """All of some dims."""
    runs = tuple(((0, shape[dim]),) for dim in dims)
    return Group(dims, runs, (0, prod(shape[dim] for dim in dims)))


def cut(group: Group, placement: Sharded, count: int) -> tuple[Group, ...]:
    """What each of `count` coordinates holds, when `placement` cuts what `group` has left."""
    if is_flat(placement):
        low, _ = group.span
        pieces = placement.pieces(group.extent, count)
        spans = [(low + start, low + end) for ((start, end),) in pieces]
        return tuple(group._replace(span=span) for span in spans)
    place = group.dims.index(placement.cut_dims()[0])
    runs = group.runs[place]
    pieces = placement.pieces(_length(runs), count)
    return tuple(_with_runs(group, place, _taken(runs, piece)) for piece in pieces)


def overlaid(group: Group, placement: Sharded, extent: int, count: int) -> tuple[Group, ...]:
    """As `cut`, but `placement` cuts the whole dim, of `extent`, whatever is left of it."""
    place = group.dims.index(placement.cut_dims()[0])
    runs = group.runs[place]
    return tuple(
        _with_runs(group, place, merged(_common(runs, piece)))
        for piece in placement.pieces(extent, count)
    )


def _common(runs: Runs, others: Runs) -> list[Interval]:
    """What lies in both; an empty interval where nothing does."""
    pairs = ((max(a, c), min(b, d)) for a, b in runs for c, d in others)
    return [pair for pair in pairs if pair[0] < pair[1]] or [(runs[0][0], runs[0][0])]


def _with_runs(group: Group, place: int, runs: Runs) -> Group:
    every = (*group.runs[:place], runs, *group.runs[place + 1 :])
    return Group(group.dims, every, (0, prod(map(_length, every))))


def _length(runs: Runs) -> int:
    return sum(high - low for low, high in runs)


def _taken(runs: Runs, wanted: Runs) -> Runs:
    """The parts of `runs` at the intervals `wanted` of their concatenation."""
    return merged([part for low, high in wanted for part, _ in _clipped(runs, low, high)])


def _clipped(runs: Runs, low: int, high: int) -> Iterator[tuple[Interval, int]]:
    """The intervals of `runs` at `low` to `high` of their concatenation, and where each begins."""
    at = 0
    for start, end in runs:
        length = end - start
        first, last = max(low - at, 0), min(high - at, length)
        if first < last or (low == high and 0 <= low - at <= length):
            yield (start + first, start + last), at + first
            if low == high:
                return  # an empty interval keeps one place
        at += length


def cells(group: Group) -> tuple[Cell, ...]:
    """What a group holds, box by box; places are those of the local dim."""
    extents = [_length(runs) for runs in group.runs]
    strides = tuple(prod(extents[i + 1 :]) for i in range(len(extents)))
    found = []
    for local in rectangles(extents, group.span):
        along = [list(_clipped(r, *part)) for r, part in zip(group.runs, local, strict=True)]
        for chosen in product(*along):
            place = sum(at * n for (_, at), n in zip(chosen, strides, strict=True))
            box = tuple(interval for interval, _ in chosen)
            found.append(Cell(box, place - group.span[0], strides))
    return tuple(found)


def rectangles(extents: Sequence[int], span: Interval) -> list[Box]:
    """A stretch of the row-major flattening of `extents` as boxes: at most 2k - 1 for k dims."""
    low, high = span
    if low >= high:
        return []
    if len(extents) == 1:
        return [(span,)]
    row = prod(extents[1:])
    first, last = low // row, (high - 1) // row
    if first == last:
        return _in_row(first, extents, (low, high))
    head = _in_row(first, extents, (low, (first + 1) * row)) if low % row else []
    tail = _in_row(last, extents, (last * row, high)) if high % row else []
    middle = (first + bool(head), last + 1 - bool(tail))
    if middle[0] == middle[1]:
        return head + tail
    return [*head, (middle, *((0, n) for n in extents[1:])), *tail]


def _in_row(row: int, extents: Sequence[int], span: Interval) -> list[Box]:
    start = row * prod(extents[1:])
    inner = rectangles(extents[1:], (span[0] - start, span[1] - start))
    return [((row, row + 1), *box) for box in inner]


def check_fits(placements: Sequence[Placement], sizes: Sequence[int], shape: Sequence[int]) -> None:
    """Check that every cut fits what earlier cuts leave, on every coordinate.

    All ranks ask this of all coordinates, so that all of them raise or none.

    Raises:
        LayoutError: a cut that does not fit the shape.
    """
    for dims in dim_groups(placements, len(shape)):
        # All extents that some coordinate has, of each dim and of their flattening.
        along: dict[int, set[int]] = {dim: {shape[dim]} for dim in dims}
        flat: set[int] | None = None
        for placement, count in zip(placements, sizes, strict=True):
            if not isinstance(placement, Sharded) or placement.cut_dims()[0] not in dims:
                continue
            if is_flat(placement):
                left = flat if flat is not None else set(map(prod, product(*along.values())))
                flat = _left(placement, left, count)
            else:
                (dim,) = placement.cut_dims()
                along[dim] = _left(placement, along[dim], count)


def _left(placement: Sharded, extents: set[int], count: int) -> set[int]:
    return {size for extent in extents for size in placement.sizes(extent, count)}


def held(
    placements: Sequence[Placement],
    sizes: Sequence[int],
    shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Group, ...]:
    """What `coordinate` holds of a tensor of global `shape`, group by group.

    Axes cut in mesh order: a later axis cuts what an earlier one left. See `check_fits`.
    """
    groups = {dims: whole(dims, shape) for dims in dim_groups(placements, len(shape))}
    for placement, count, index in zip(placements, sizes, coordinate, strict=True):
        if isinstance(placement, Sharded):
            dims = next(d for d in groups if placement.cut_dims()[0] in d)
            groups[dims] = cut(groups[dims], placement, count)[index]
    return tuple(groups.values())
