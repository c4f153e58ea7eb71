"""Cost model: what ranks lack between two states, as shares of the global tensor.

Measured on a model shape that every shard divides evenly. So the result does not depend on the real
shape; what it leaves out is unevenness.
"""

from __future__ import annotations

from itertools import product
from math import lcm, prod

from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import InterleavedShard, RaggedShard, StridedShard
from vescale_dtensor._redistribute.ownership import OwnershipMap, PlanContext, common_groups
from vescale_dtensor._redistribute.regions import overlaps
from vescale_dtensor._redistribute.states import Axes, Dims, Placements, State

Shares = tuple[Axes, dict[Coordinate, float]]
"""The axes that matter to some dims, and by the coordinates there the share that is kept."""

# Coordinates that are enumerated at most; larger meshes are modelled by smaller ones.
_MOST_RANKS = 64


class CostModel:
    """Measures states of one tensor on one mesh.

    Args:
        placements: all placements that any of the states may have.
        sizes: extent of each mesh axis.
        ndim: number of dims.
    """

    def __init__(self, placements: Placements, sizes: tuple[int, ...], ndim: int) -> None:
        sizes = _modelled(sizes, placements)
        self.sizes = sizes
        # Every dim has the same extent: one that each axis can divide by its size and by what its
        # placement needs, also inside of all the others. So every shard is even.
        extent = (prod(sizes) * lcm(*map(_divisor, placements))) ** len(sizes)
        self._frame = PlanContext(sizes, (extent,) * ndim, (0,) * len(sizes), 1)
        # Caches of this one search: its candidates share most of their states and shards.
        self._grids: dict[State, OwnershipMap] = {}
        self._tables: dict[object, Shares] = {}

    def owned(self, state: State) -> float:
        """Return the share that a rank owns."""
        pairs = zip(state.placements, self.sizes, strict=True)
        return 1.0 / prod(n for p, n in pairs if isinstance(p, Sharded))

    def missing(self, before: State, after: State) -> float:
        """Return the share that a rank owns in `after` and not in `before`, on average."""
        old, new = self._grid(before), self._grid(after)
        # Groups of dims are independent, so shares multiply: a table per group is small where one
        # over all coordinates of the mesh would not be.
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
        """The measured shares of some dims, shared by all states that shard these dims alike."""
        key = (old.shards(dims), new.shards(dims))
        known = self._tables.get((dims, key))
        if known is None:
            known = self._tables[dims, key] = self._measured(dims, old, new)
        return known

    def _measured(self, dims: Dims, old: OwnershipMap, new: OwnershipMap) -> Shares:
        """Measure, for every coordinate on the axes that matter, which share of `dims` it keeps."""
        matter = tuple(sorted({*old.sharding_axes(dims), *new.sharding_axes(dims)}))
        total = prod(self._frame.shape[dim] for dim in dims)
        table = {}
        for place in product(*(range(self.sizes[axis]) for axis in matter)):
            at = [0] * len(self.sizes)
            for axis, index in zip(matter, place, strict=True):
                at[axis] = index
            table[place] = _shared_elements(dims, old, new, tuple(at)) / total
        return matter, table


def _modelled(sizes: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
    """Shrink a mesh until all its coordinates can be enumerated; its number of axes stays."""
    most = max(2, int(_MOST_RANKS ** (1 / len(sizes))))
    # A ragged shard has a number of units for each coordinate, so its axis cannot shrink. At least
    # two coordinates remain, since an axis of one would seem to cost nothing.
    if prod(sizes) <= _MOST_RANKS or any(isinstance(p, RaggedShard) for p in placements):
        return sizes
    return tuple(min(n, most) for n in sizes)


def _shared_elements(dims: Dims, old: OwnershipMap, new: OwnershipMap, at: Coordinate) -> int:
    """Count the elements of some dims that a coordinate owns in both maps."""
    # Of one dim, intervals are enough; flattened groups need boxes.
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
    """Return what an extent must be a multiple of to be sharded evenly, beside the axis' size."""
    if isinstance(placement, InterleavedShard):
        return placement.unit
    if isinstance(placement, StridedShard):
        return placement.split_factor
    if isinstance(placement, RaggedShard):
        return sum(placement.local_units) or 1
    return 1
