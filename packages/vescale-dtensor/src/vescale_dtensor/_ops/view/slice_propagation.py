"""Propagates shards through a slice: every rank keeps its part of the result, in place.

A slice of a sharded dim leaves uneven shards, also empty ones; an integer leaves everything to the
rank that owns the index. Nothing is sent, and the result aliases the operand, so that writing to it
writes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.derived_placements import on_dim, split_of
from vescale_dtensor._layout.intervals import Interval, Intervals, merged
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_groups
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Partial,
    Shard,
    StridedShard,
    is_flat,
)
from vescale_dtensor._layout.shard_geometry import intervals_at
from vescale_dtensor._ops.view.reshape_propagation import owner_shard

_PARTIAL = Partial()


class DimSlice(NamedTuple):
    """What is selected of one dim.

    Attributes:
        start, length, step: the first index, how many, and how far apart.
        keeps_dim: whether the result has the dim; else one index is selected.
    """

    start: int
    length: int
    step: int = 1
    keeps_dim: bool = True

    def before(self, index: int) -> int:
        """How many of the selected indices are smaller than `index`."""
        return max(0, min(self.length, -(-(index - self.start) // self.step)))

    def covers(self, extent: int) -> bool:
        """Whether the dim stays as it is."""
        return self.keeps_dim and self == DimSlice(0, extent)


class SliceResult(NamedTuple):
    """One result: what is selected of each dim, and where the dims go.

    Attributes:
        parts: per dim.
        target_dims: per dim its place in the result, or None where it is dropped.
        shape: of the result.
    """

    parts: tuple[DimSlice, ...]
    target_dims: tuple[int | None, ...]
    shape: Shape


def slice_result(parts: Sequence[DimSlice]) -> SliceResult:
    """The result that has the dims that are kept, in their order."""
    kept = [d for d, part in enumerate(parts) if part.keeps_dim]
    places = tuple(kept.index(d) if d in kept else None for d in range(len(parts)))
    return SliceResult(tuple(parts), places, tuple(parts[d].length for d in kept))


def slices_sharded_dim(layout: Layout, shape: Shape, result: SliceResult) -> bool:
    """Whether only a part of some sharded dim is selected."""
    return any(
        isinstance(p, Sharded) and any(not result.parts[d].covers(shape[d]) for d in p.cut_dims())
        for p in layout.placements
    )


def slice_placements(
    layout: Layout, shape: Shape, results: Sequence[SliceResult]
) -> list[tuple[Placement, ...]]:
    """For each axis the placements of all results; empty where its shard cannot stay in all."""
    stopped: set[int] = set()
    found: list[list[Placement]] = []
    # One for each result: they take different parts, and so leave different shards.
    propagations = [_SlicePropagation(shape, result) for result in results]
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded):
            found.append([placement] * len(results))
            continue
        dims = placement.cut_dims()
        passed = [propagation.through(placement, count) for propagation in propagations]
        # One list of placements serves all results of a split: a shard stays in all, or in none.
        if not stopped.isdisjoint(dims) or None in passed:
            stopped.update(dims)
            found.append([])
            continue
        # Only a shard that stays divides what inner axes see.
        for propagation in propagations:
            propagation.advance(placement, count)
        found.append([p for p in passed if p is not None])
    # Only now are all shards of each result known.
    for index, result in enumerate(results):
        _resolve_owners([row for row in found if row], index, len(result.shape))
    return [tuple(row) for row in found]


@dataclass(frozen=True, slots=True)
class _OwnedBy(Placement):
    """Everything belongs to the coordinate whose unit is one, of a dim that the result lacks.

    A stand-in until the other axes' shards are known, which decide what dim can say so.
    """

    units: tuple[int, ...]


def _resolve_owners(rows: list[list[Placement]], index: int, ndim: int) -> None:
    for row in rows:
        owned = row[index]
        if isinstance(owned, _OwnedBy):
            kept = owner_shard(owned.units, [other[index] for other in rows], ndim)
            # Without a dim to shard, the result is partial: the owner has the value, others zeros.
            row[index] = kept if isinstance(kept, Sharded) else _PARTIAL


class _SlicePropagation:
    """Follows the shards of all dims of one result, axis by axis from the outermost."""

    def __init__(self, shape: Shape, result: SliceResult) -> None:
        self._result = result
        # What the axes seen so far leave of each dim, at each of their coordinates; and those of
        # them that are not accounted for yet, as nobody may ask.
        self._remaining: list[list[Intervals]] = [[((0, n),)] for n in shape]
        self._unseen: list[list[tuple[Sharded, int]]] = [[] for _ in shape]
        self._shape = shape

    def through(self, placement: Sharded, count: int) -> Placement | None:
        """The placement of the result, or None."""
        dims = placement.cut_dims()
        # A shard of several dims flattened stays if all of them are selected, and stay adjacent.
        if is_flat(placement):
            places = [self._result.target_dims[d] for d in dims]
            complete = all(self._result.parts[d].covers(self._shape[d]) for d in dims)
            first = places[0]
            if not complete or first is None or places != list(range(first, first + len(dims))):
                return None
            return on_dim(placement, first)
        (dim,) = dims
        part, place = self._result.parts[dim], self._result.target_dims[dim]
        if part.covers(self._shape[dim]) and place is not None:
            return on_dim(placement, place)
        if place is None:
            return _OwnedBy(_owner(part.start, self._contexts(dim), placement, count))
        return _recognized(place, part, self._contexts(dim), placement, count)

    def advance(self, placement: Sharded, count: int) -> None:
        """Account for an axis that shards, before the next one is looked at."""
        if not is_flat(placement):
            (dim,) = placement.cut_dims()
            self._unseen[dim].append((placement, count))

    def _contexts(self, dim: int) -> list[Intervals]:
        """What is left of a dim at each coordinate of the axes seen so far."""
        for placement, count in self._unseen[dim]:
            shards = [_shards_of(intervals, placement, count) for intervals in self._remaining[dim]]
            self._remaining[dim] = [own for group in shards for own in group]
        self._unseen[dim] = []
        return self._remaining[dim]


def _shards_of(intervals: Intervals, placement: Sharded, count: int) -> list[Intervals]:
    pieces = placement.pieces(sum([high - low for low, high in intervals]), count)
    return [intervals_at(intervals, piece) for piece in pieces]


def _owner(
    index: int, contexts: list[Intervals], placement: Sharded, count: int
) -> tuple[int, ...]:
    units = [0] * count
    # The index is in one context, and there at one coordinate.
    for intervals in contexts:
        if any(low <= index < high for low, high in intervals):
            shards = enumerate(_shards_of(intervals, placement, count))
            (owner,) = [i for i, own in shards for low, high in own if low <= index < high]
            units[owner] = 1
            break
    return tuple(units)


def _recognized(
    dim: int, part: DimSlice, contexts: list[Intervals], placement: Sharded, count: int
) -> Placement | None:
    """The placement that gives each coordinate its part of a slice; None if there is none.

    Candidates are guessed from one context (what one coordinate of the outer axes has) and checked
    against all: an inner axis has one placement for all of them.
    """
    wanted = []
    for intervals in _different(contexts, part):
        shards = _shards_of(intervals, placement, count)
        if part.step > 1 and any(len(own) > 1 for own in shards):
            return None  # each interval would begin at another phase of the step
        extent, found = _part_in(part, intervals, shards)
        if extent:  # a context that has nothing of the slice agrees with any placement
            wanted.append((extent, found))
    if not wanted:
        return Shard(dim)
    propagations = _guesses(dim, placement, wanted[0][1])
    return next(
        (p for p in propagations if all(_shards_like(p, n, found) for n, found in wanted)), None
    )


def _different(contexts: list[Intervals], part: DimSlice) -> Iterator[Intervals]:
    """The contexts, but one of those that a slice covers entirely and that are divided alike."""
    seen = set()
    for intervals in contexts:
        first, last = intervals[0][0], intervals[-1][1]
        if part.step == 1 and part.start <= first and last <= part.start + part.length:
            lengths = tuple([(low - first, high - first) for low, high in intervals])
            if lengths in seen:
                continue
            seen.add(lengths)
        yield intervals


def _part_in(
    part: DimSlice, intervals: Intervals, shards: list[Intervals]
) -> tuple[int, list[Intervals]]:
    """How much of a slice is in `intervals`, and which part of that each of `shards` has."""
    offsets, extent = [], 0
    for low, high in intervals:
        offsets.append(extent - part.before(low))
        extent += part.before(high) - part.before(low)

    def place(interval: Interval) -> Interval:
        low, high = interval
        inside = (i for i, (a, b) in enumerate(intervals) if a <= low and high <= b)
        at = 0 if len(intervals) == 1 else next(inside)
        return part.before(low) + offsets[at], part.before(high) + offsets[at]

    return extent, [_filled([place(interval) for interval in own]) for own in shards]


def _filled(intervals: Sequence[Interval]) -> Intervals:
    """Without empty intervals, in as few as possible."""
    if len(intervals) == 1:
        return tuple(intervals) if intervals[0][0] < intervals[0][1] else ()
    return tuple(run for run in merged(intervals) if run[0] < run[1])


def _guesses(dim: int, placement: Sharded, shards: list[Intervals]) -> Iterator[Sharded]:
    # The sizes as they are first: of an uneven slice nothing else fits.
    yield split_of(dim, [sum(high - low for low, high in intervals) for intervals in shards])
    yield on_dim(placement, dim)
    for blocks in sorted({len(intervals) for intervals in shards}):
        if blocks > 1:
            yield InterleavedShard(dim, blocks)
            yield StridedShard(dim, blocks)


def _shards_like(placement: Sharded, extent: int, shards: list[Intervals]) -> bool:
    try:
        # Pieces are in as few intervals as possible, and an empty one has no other.
        pieces = placement.pieces(extent, len(shards))
        return [own if own[0][0] < own[0][1] else () for own in pieces] == shards
    except LayoutError:
        return False  # units of a ragged shard that do not divide this extent


def local_slice(layout: Layout, shape: Shape, dim: int, part: DimSlice) -> slice:
    """The slice of this rank's local tensor that is its part of a global slice along a dim.

    For shards that can stay (see `slice_placements`): only of those is it one slice.
    """
    groups = local_groups(layout, shape)
    intervals = next(group.intervals[0] for group in groups if group.dims == (dim,))
    counts = [part.before(high) - part.before(low) for low, high in intervals]
    skipped = 0  # local indices of intervals that the slice does not touch
    for (low, high), count in zip(intervals, counts, strict=True):
        if count:
            first = part.start + part.before(low) * part.step - low + skipped
            return slice(first, first + (sum(counts) - 1) * part.step + 1, part.step)
        skipped += high - low
    return slice(0, 0)
