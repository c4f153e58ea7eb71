"""Cost model: how much of a tensor ranks lack between two states, as shares of the whole tensor.

Measured on a model shape that every shard divides evenly, so it holds for every shape, up to
unevenness.
"""

from __future__ import annotations

from itertools import product
from math import lcm, prod

from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placements import (
    InterleavedShard,
    Intervals,
    Placement,
    RaggedShard,
    Sharded,
    StridedShard,
)
from vescale_dtensor._redistribute.ownership import OwnershipMap, PlanContext, common_groups
from vescale_dtensor._redistribute.regions import overlaps
from vescale_dtensor._redistribute.states import Axes, Dims, Placements, State

Shares = tuple[Axes, dict[Coordinate, float]]
"""The axes that matter to some dims, and by the coordinates there the share that is kept."""

_MOST_RANKS = 64


class CostModel:
    """Measures states of one tensor on one mesh.

    Args:
        placements: all that any of the states may have.
        sizes: extent of each mesh axis.
        ndim: number of dims.
    """

    def __init__(self, placements: Placements, sizes: tuple[int, ...], ndim: int) -> None:
        sizes = _modelled(sizes, placements)
        self.sizes = sizes
        # Even cuts only, so that one choice serves every shape.
        # Every axis may cut like this what another has left.
        extent = (prod(sizes) * lcm(*map(_divisor, placements))) ** len(sizes)
        self._frame = PlanContext(sizes, (extent,) * ndim, (0,) * len(sizes), 1)
        self._grids: dict[State, OwnershipMap] = {}
        self._tables: dict[object, Shares] = {}

    def owned(self, state: State) -> float:
        """What a rank holds, on average."""
        pairs = zip(state.placements, self.sizes, strict=True)
        return 1.0 / prod(n for p, n in pairs if isinstance(p, Sharded))

    def missing(self, before: State, after: State) -> float:
        """What a rank does not hold of what it will hold, on average."""
        old, new = self._grid(before), self._grid(after)
        # Dims are independent, so shares multiply; each table is small, the whole mesh is not.
        tables = [self._table(dims, old, new) for dims in common_groups(old, new)]
        axes = sorted({axis for matter, _ in tables for axis in matter})
        kept = 0.0
        for place in product(*(range(self.sizes[axis]) for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            share = 1.0
            for matter, table in tables:
                share *= table[tuple([at[axis] for axis in matter])]
            kept += share
        return self.owned(after) - kept / prod(self.sizes[axis] for axis in axes)

    def _grid(self, state: State) -> OwnershipMap:
        grid = self._grids.get(state)
        if grid is None:
            grid = self._grids[state] = OwnershipMap(state, self._frame)
        return grid

    def _table(self, dims: Dims, old: OwnershipMap, new: OwnershipMap) -> Shares:
        key = (old.shards(dims), new.shards(dims))
        known = self._tables.get((dims, key))
        if known is None:
            known = self._tables[dims, key] = self._measured(dims, old, new)
        return known

    def _measured(self, dims: Dims, old: OwnershipMap, new: OwnershipMap) -> Shares:
        matter = tuple(sorted({*old.sharding_axes(dims), *new.sharding_axes(dims)}))
        whole = prod(self._frame.shape[dim] for dim in dims)
        table = {}
        for place in product(*(range(self.sizes[axis]) for axis in matter)):
            at = [0] * len(self.sizes)
            for axis, index in zip(matter, place, strict=True):
                at[axis] = index
            table[place] = _shared_elements(dims, old, new, tuple(at)) / whole
        return matter, table


def _modelled(sizes: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
    """A mesh of the same kind on which everything can be looked at in a moment."""
    most = max(2, int(_MOST_RANKS ** (1 / len(sizes))))
    if prod(sizes) <= _MOST_RANKS or any(isinstance(p, RaggedShard) for p in placements):
        return sizes
    return tuple(min(n, most) for n in sizes)


def _shared_elements(dims: Dims, old: OwnershipMap, new: OwnershipMap, at: Coordinate) -> int:
    """Elements of some dims that a coordinate holds in both grids."""
    if len(dims) == 1:
        return _overlap(old.owned(dims, at).intervals[0], new.owned(dims, at).intervals[0])
    return sum(
        part.numel for part, _ in overlaps(old.strided_boxes(dims, at), new.strided_boxes(dims, at))
    )


def _overlap(runs: Intervals, others: Intervals) -> int:
    return sum(
        max(0, min(high, end) - max(low, start)) for low, high in runs for start, end in others
    )


def _divisor(placement: Placement) -> int:
    """What an extent has to be a multiple of to be cut evenly."""
    if isinstance(placement, InterleavedShard):
        return placement.blocks
    if isinstance(placement, StridedShard):
        return placement.split_factor
    if isinstance(placement, RaggedShard):
        return sum(placement.local_units) or 1
    return 1
