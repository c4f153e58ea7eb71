"""How a cut passes through a slice: every rank keeps what it has of the result, where it lies.

A slice of a cut dim leaves uneven pieces, also empty ones; one index leaves everything to its
owner. Nothing is sent, and what comes out aliases what went in, so writing to it writes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_dtensor._errors import LayoutError
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Interval,
    Partial,
    Placement,
    Runs,
    Shard,
    Sharded,
    StridedShard,
    is_flat,
    merged,
    moved,
    split_of,
)
from vescale_dtensor._layout.shard_geometry import Group, cut, held
from vescale_dtensor._ops.view.reshape_propagation import kept_by

_TERM = Partial()


class Part(NamedTuple):
    """What is taken of one dim.

    Attributes:
        start, length, step: the first index, how many, and how far apart.
        keeps: whether the result has the dim; else one index is taken.
    """

    start: int
    length: int
    step: int = 1
    keeps: bool = True

    def before(self, index: int) -> int:
        """How many of the indices that are taken are smaller than `index`."""
        return max(0, min(self.length, -(-(index - self.start) // self.step)))

    def covers(self, extent: int) -> bool:
        """Whether the dim is taken as it is."""
        return self.keeps and self == Part(0, extent)


class Taken(NamedTuple):
    """One result: what is taken of each dim, and where the dims go.

    Attributes:
        parts: per dim.
        places: per dim its place in the result, or None where it is dropped.
        shape: of the result.
    """

    parts: tuple[Part, ...]
    places: tuple[int | None, ...]
    shape: Shape


def plain_taken(parts: Sequence[Part]) -> Taken:
    """The result that has the dims that are kept, in their order."""
    kept = [d for d, part in enumerate(parts) if part.keeps]
    places = tuple(kept.index(d) if d in kept else None for d in range(len(parts)))
    return Taken(tuple(parts), places, tuple(parts[d].length for d in kept))


def touches(layout: Layout, shape: Shape, taken: Taken) -> bool:
    """Whether not all of a dim that is cut is taken."""
    return any(
        isinstance(p, Sharded) and any(not taken.parts[d].covers(shape[d]) for d in p.cut_dims())
        for p in layout.placements
    )


def sliced(layout: Layout, shape: Shape, results: Sequence[Taken]) -> list[tuple[Placement, ...]]:
    """For each axis the placements of all results; empty where the cut cannot pass for all."""
    stopped: set[int] = set()
    found: list[list[Placement]] = []
    ways = [_Ways(shape, taken) for taken in results]
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        if not isinstance(placement, Sharded):
            found.append([placement] * len(results))
            continue
        dims = placement.cut_dims()
        passed = [way.through(placement, count) for way in ways]
        if not stopped.isdisjoint(dims) or None in passed:
            stopped.update(dims)
            found.append([])
            continue
        for way in ways:
            way.follow(placement, count)
        found.append([p for p in passed if p is not None])
    for index, taken in enumerate(results):
        _settle_owners([row for row in found if row], index, len(taken.shape))
    return [tuple(row) for row in found]


@dataclass(frozen=True, slots=True)
class _Owned(Placement):
    """Until all other cuts are known: everything belongs to the coordinate whose unit is one."""

    units: tuple[int, ...]


def _settle_owners(rows: list[list[Placement]], index: int, ndim: int) -> None:
    for row in rows:
        owned = row[index]
        if isinstance(owned, _Owned):
            kept = kept_by(owned.units, [other[index] for other in rows], ndim)
            # What has no dims cannot be cut: then the owner has the only term of a sum.
            row[index] = kept if isinstance(kept, Sharded) else _TERM


class _Ways:
    """Follows the cuts of all dims of one result, axis by axis."""

    def __init__(self, shape: Shape, taken: Taken) -> None:
        self._taken = taken
        # What the axes seen so far leave of each dim, at each of their coordinates.
        self._left: list[list[Runs]] = [[((0, n),)] for n in shape]
        self._shape = shape

    def through(self, placement: Sharded, count: int) -> Placement | None:
        """The placement of the result, or None."""
        dims = placement.cut_dims()
        if is_flat(placement):
            places = [self._taken.places[d] for d in dims]
            whole = all(self._taken.parts[d].covers(self._shape[d]) for d in dims)
            first = places[0]
            if not whole or first is None or places != list(range(first, first + len(dims))):
                return None
            return moved(placement, first)
        (dim,) = dims
        part, place = self._taken.parts[dim], self._taken.places[dim]
        if part.covers(self._shape[dim]) and place is not None:
            return moved(placement, place)
        if place is None:
            return _Owned(_owner(part.start, self._left[dim], placement, count))
        return _recognized(place, part, self._left[dim], placement, count)

    def follow(self, placement: Sharded, count: int) -> None:
        """Go on to the next axis."""
        if is_flat(placement):
            return
        (dim,) = placement.cut_dims()
        pieces = [_pieces(runs, placement, count) for runs in self._left[dim]]
        self._left[dim] = [piece for group in pieces for piece in group]


def _pieces(runs: Runs, placement: Sharded, count: int) -> list[Runs]:
    group = Group((0,), (runs,), (0, sum(high - low for low, high in runs)))
    return [piece.runs[0] for piece in cut(group, moved(placement, 0), count)]


def _owner(index: int, contexts: list[Runs], placement: Sharded, count: int) -> tuple[int, ...]:
    units = [0] * count
    for runs in contexts:
        for coordinate, piece in enumerate(_pieces(runs, placement, count)):
            units[coordinate] += any(low <= index < high for low, high in piece)
    return tuple(units)


def _recognized(
    dim: int, part: Part, contexts: list[Runs], placement: Sharded, count: int
) -> Placement | None:
    """The placement that cuts what is left of a slice as `placement` cut the whole."""
    wanted = []
    for runs in contexts:
        pieces = _pieces(runs, placement, count)
        if part.step > 1 and any(len(piece) > 1 for piece in pieces):
            return None  # every interval would begin at another phase of the step
        extent, found = _within(part, runs, pieces)
        if extent:
            wanted.append((extent, found))
    if not wanted:
        return Shard(dim)
    ways = _guesses(dim, placement, wanted[0][1])
    return next((p for p in ways if all(_cuts_like(p, n, found) for n, found in wanted)), None)


def _within(part: Part, runs: Runs, pieces: list[Runs]) -> tuple[int, list[Runs]]:
    """How much of a slice lies in `runs`, and where in that the pieces of `runs` are."""
    offsets, extent = [], 0
    for low, high in runs:
        offsets.append(extent - part.before(low))
        extent += part.before(high) - part.before(low)

    def place(interval: Interval) -> Interval:
        low, high = interval
        at = next(i for i, (a, b) in enumerate(runs) if a <= low and high <= b)
        return part.before(low) + offsets[at], part.before(high) + offsets[at]

    return extent, [_filled([place(interval) for interval in piece]) for piece in pieces]


def _filled(runs: Sequence[Interval]) -> Runs:
    """Without empty intervals, in as few as possible."""
    return tuple(run for run in merged(runs) if run[0] < run[1])


def _guesses(dim: int, placement: Sharded, pieces: list[Runs]) -> Iterator[Sharded]:
    yield split_of(dim, [sum(high - low for low, high in runs) for runs in pieces])
    yield moved(placement, dim)
    for blocks in sorted({len(runs) for runs in pieces}):
        if blocks > 1:
            yield InterleavedShard(dim, blocks)
            yield StridedShard(dim, blocks)


def _cuts_like(placement: Sharded, extent: int, pieces: list[Runs]) -> bool:
    try:
        return [_filled(runs) for runs in placement.pieces(extent, len(pieces))] == pieces
    except LayoutError:
        return False


def local_part(layout: Layout, shape: Shape, dim: int, part: Part) -> slice:
    """What this rank takes of its local tensor along a dim.

    Only for cuts that passed: then it is at equal distances there, too.
    """
    groups = held(layout.placements, layout.sizes, shape, layout.coordinate)
    runs = next(group.runs[0] for group in groups if group.dims == (dim,))
    counts = [part.before(high) - part.before(low) for low, high in runs]
    skipped = 0
    for (low, high), count in zip(runs, counts, strict=True):
        if count:
            first = part.start + part.before(low) * part.step - low + skipped
            return slice(first, first + (sum(counts) - 1) * part.step + 1, part.step)
        skipped += high - low
    return slice(0, 0)
