"""Finds the features (first two indices) that a layout's boxes touch: each is drawn once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from vescale_rng._layout.layout import Box, Ints, ShardLayout

# Stretches of one dim, as (start, stop, place in the local noise).
_Stretches = list[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Features:
    """The features of one rank, packed into a matrix.

    Attributes:
        shape: of the matrix.
        layout: the matrix as a shard of the noise of one device, which has the first two dims.
        places: for each box of the tensor, its rows and columns of the matrix.
    """

    shape: Ints
    layout: ShardLayout
    places: tuple[tuple[slice, slice], ...]


def features_of(layout: ShardLayout) -> Features:
    """Return the features that `layout` touches, at least: rows times columns of them."""
    return layout.remembered("features", lambda: _features(layout))


def _features(layout: ShardLayout) -> Features:
    boxes = layout.boxes
    rows = _packed([(b.global_offset[0], b.global_offset[0] + b.shape[0]) for b in boxes])
    columns = _packed([(b.global_offset[1], b.global_offset[1] + b.shape[1]) for b in boxes])
    shape = (_length(rows), _length(columns))
    # The noise is packed: rows and columns that no box touches are left out. Their product may
    # hold a feature that no box has; it is drawn for nothing, and is right all the same.
    cells = tuple(
        Box((low, left), (high - low, right - left), at * shape[1] + here, (shape[1], 1))
        for (low, high, at), (left, right, here) in product(rows, columns)
    )
    noise = ShardLayout(layout.global_shape[:2], cells, local_shape=shape)
    places = tuple((_place(rows, box, 0), _place(columns, box, 1)) for box in boxes)
    return Features(shape, noise, places)


def _packed(ranges: Sequence[tuple[int, int]]) -> _Stretches:
    """Unite ranges into disjoint stretches, one after another."""
    stretches: _Stretches = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        # Overlapping and adjacent ranges become one stretch: a feature is drawn once.
        if stretches and start <= stretches[-1][1]:
            low, high, at = stretches[-1]
            stretches[-1] = (low, max(high, stop), at)
        else:
            stretches.append((start, stop, _length(stretches)))
    return stretches


def _length(stretches: _Stretches) -> int:
    return stretches[-1][2] + stretches[-1][1] - stretches[-1][0] if stretches else 0


def _place(stretches: _Stretches, box: Box, dim: int) -> slice:
    start, count = box.global_offset[dim], box.shape[dim]
    if not count:
        return slice(0, 0)
    low, _, at = next(s for s in stretches if s[0] <= start < s[1])
    return slice(at + start - low, at + start - low + count)
