"""Where the data is: boxes of every coordinate, looked at one dim at a time.

A box is a product of intervals, and the interval of a dim depends only on the axes that cut it. So
questions about all ranks are answered per dim, over the few coordinates that matter to it, and the
answer is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

from vescale_dtensor._layout import Box, Interval, Shape
from vescale_dtensor._mesh import Coordinate
from vescale_dtensor._redistribution_stages import Axes, Placements, cuts


class Frame(NamedTuple):
    """What a plan is made for, besides placements.

    Attributes:
        sizes: extent of each mesh axis.
        shape: global shape.
        coordinate: of the rank whose plan it is.
        itemsize: bytes of an element.
    """

    sizes: tuple[int, ...]
    shape: Shape
    coordinate: Coordinate
    itemsize: int

    def members(self, axes: Axes) -> list[Coordinate]:
        """Coordinates of the flattened group over `axes`, in its order."""
        return list(varied(self.coordinate, axes, self.sizes))


def varied(base: Coordinate, axes: Axes, sizes: tuple[int, ...]) -> Iterator[Coordinate]:
    """Coordinates that differ from `base` only along `axes`, row-major over them."""
    return product(*(range(n) if a in axes else (base[a],) for a, n in enumerate(sizes)))


class Grid:
    """The boxes of all coordinates under some placements."""

    def __init__(self, placements: Placements, frame: Frame) -> None:
        self.sizes = frame.sizes
        self.shape = frame.shape
        self.cuts = tuple(cuts(placements, dim) for dim in range(len(frame.shape)))
        # Per dim: what is left after the first cuts, by the coordinates on their axes.
        self._known: list[dict[Coordinate, Interval]] = [{(): (0, n)} for n in frame.shape]

    def cutters(self, dim: int) -> Axes:
        """The axes that cut `dim`, outermost first."""
        return tuple(axis for axis, _ in self.cuts[dim])

    def interval(self, dim: int, coordinate: Coordinate) -> Interval:
        """What `coordinate` holds of `dim`."""
        place = tuple([coordinate[axis] for axis, _ in self.cuts[dim]])
        known = self._known[dim]
        if place not in known:
            self._cut(dim, place[:-1])
        return known[place]

    def _cut(self, dim: int, place: Coordinate) -> None:
        """Enter the pieces of what is left at `place`, all at once."""
        known = self._known[dim]
        if place not in known:
            self._cut(dim, place[:-1])
        axis, placement = self.cuts[dim][len(place)]
        low, high = known[place]
        for index, extent in enumerate(placement.sizes(high - low, self.sizes[axis])):
            known[(*place, index)] = (low, low + extent)
            low += extent

    def box(self, coordinate: Coordinate) -> Box:
        """What `coordinate` holds."""
        return tuple(self.interval(dim, coordinate) for dim in range(len(self.shape)))


def equal(old: Grid, new: Grid) -> bool:
    """Whether every coordinate holds the same box in both."""
    return all(
        old.cuts[dim] == new.cuts[dim]
        or all(old.interval(dim, c) == new.interval(dim, c) for c in _relevant(old, new, dim))
        for dim in range(len(old.shape))
    )


def axes_needed(old: Grid, new: Grid) -> Axes:
    """The fewest axes whose groups hold, in `old`, all that their members hold in `new`.

    Only axes that cut in `old` are among them, so no two members of such a group hold the same
    element: who sends what is never a choice.
    """
    needed = {axis for dim in range(len(old.shape)) for axis in _needed_along(dim, old, new)}
    return tuple(sorted(needed))


def _needed_along(dim: int, old: Grid, new: Grid) -> Axes:
    before, after = old.cuts[dim], new.cuts[dim]
    # Nearly always one list of cuts continues the other: no coordinate has to be looked at.
    if after[: len(before)] == before:
        return ()
    if before[: len(after)] == after:
        return old.cutters(dim)[len(after) :]
    cutters = old.cutters(dim)
    # Few choices: at most as many axes as the mesh has cut this dim.
    fewer = (axes for count in range(len(cutters)) for axes in combinations(cutters, count))
    relevant = list(_relevant(old, new, dim))
    # All cutters together hold the whole dim, so there is nothing to check for the last choice.
    return next((axes for axes in fewer if _suffice(axes, dim, old, new, relevant)), cutters)


def _suffice(axes: Axes, dim: int, old: Grid, new: Grid, relevant: list[Coordinate]) -> bool:
    for coordinate in relevant:
        low, high = new.interval(dim, coordinate)
        held = (old.interval(dim, c) for c in varied(coordinate, axes, old.sizes))
        # The members' intervals are disjoint: what they cover is the sum of what each covers.
        if sum(max(0, min(high, end) - max(low, start)) for start, end in held) != high - low:
            return False
    return True


def _relevant(old: Grid, new: Grid, dim: int) -> Iterator[Coordinate]:
    return varied((0,) * len(old.sizes), old.cutters(dim) + new.cutters(dim), old.sizes)


def overlap(box: Box, other: Box) -> Box:
    """The part of `box` that lies in `other`; where there is none, an empty interval of `box`."""
    return tuple(map(_common, box, other))


def _common(interval: Interval, other: Interval) -> Interval:
    # Clamped into the interval, so that an empty part can be cut out like any other.
    low = min(max(interval[0], other[0]), interval[1])
    return low, max(low, min(interval[1], other[1]))


def offset(box: Box, inside: Box) -> Shape:
    """Where `box` begins, counted from the beginning of `inside`."""
    return tuple(low - origin for (low, _), (origin, _) in zip(box, inside, strict=True))
