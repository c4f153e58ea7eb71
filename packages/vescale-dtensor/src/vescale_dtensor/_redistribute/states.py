"""States between the steps of a redistribution: placements, and the order in which axes shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import (
    Partial,
    ReduceOp,
    Replicate,
    Shard,
    StridedShard,
    is_flat,
)

Placements = tuple[Placement, ...]
Axes = tuple[int, ...]
Dims = tuple[int, ...]
AxisShards = tuple[tuple[int, Sharded], ...]


class State(NamedTuple):
    """Placements of all mesh axes, and the order in which the axes shard.

    A layout always shards in mesh order. In between, an axis may shard inside a later one: the
    local tensor of a partial sum can only be sharded further, whatever the order of its axes in the
    mesh.

    Attributes:
        placements: one per mesh axis.
        order: all axes, the one that shards first (outermost) in front.
    """

    placements: Placements
    order: Axes

    def replacing(self, changes: Mapping[int, Placement]) -> State:
        """Replace the placements of some axes; the order stays."""
        return self._replace(placements=replace_placements(self.placements, changes))

    def innermost(self, axes: Iterable[int]) -> State:
        """Let these axes shard after all others, in the order given; the placements stay."""
        last = tuple(axes)
        return self._replace(order=(*(a for a in self.order if a not in last), *last))


@dataclass(frozen=True, slots=True)
class UnclippedShard(Sharded):
    """A shard of the full dim, intersected with what other axes have left of that dim.

    An intermediate state, not a legal layout: some coordinates may be left with nothing. It is
    needed when a partial sum is reduce-scattered into a dim that two mesh axes shard (or a tensor
    that two axes shard becomes partial on one of them): each rank then receives exactly the
    elements it needs.
    """

    shard: Sharded

    @property
    def dim(self) -> int:
        """The dim that is sharded."""
        (dim,) = self.shard.cut_dims()
        return dim

    def cut_dims(self) -> tuple[int, ...]:
        """Return the sharded dim."""
        return self.shard.cut_dims()

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Intervals of the full dim, of `extent`, that each of `count` coordinates may own."""
        return self.shard.pieces(extent, count)


def in_mesh_order(placements: Placements) -> State:
    """Return the state of a layout: its axes shard in mesh order."""
    return State(placements, tuple(range(len(placements))))


def replace_placements(placements: Placements, changes: Mapping[int, Placement]) -> Placements:
    """Replace the placements of some axes."""
    return tuple(changes.get(axis, p) for axis, p in enumerate(placements))


def shards_of(state: State, dims: Dims) -> AxisShards:
    """Return the axes that shard any of `dims`, outermost first, with their placements."""
    found = []
    for axis in state.order:
        placement = state.placements[axis]
        if isinstance(placement, Sharded) and not set(dims).isdisjoint(placement.cut_dims()):
            found.append((axis, placement))
    return tuple(found)


def admits_shard(state: State, shard: Sharded, outer: AxisShards) -> bool:
    """Whether `shard` fits inside what `state` leaves of its dims, for every global shape.

    Args:
        state: the state before `shard` is applied.
        shard: the placement to apply inside all others.
        outer: shards of the same dims inside of which `shard` is known to fit, because a layout has
            them.
    """
    before = shards_of(state, shard.cut_dims())
    # These divide any extent, evenly or not. But inside a flattened group of dims there is no
    # single dim left to shard.
    if isinstance(shard, Shard | StridedShard | UnclippedShard):
        return not any(is_flat(placement) for _, placement in before)
    # Interleaved and ragged shards need certain divisors, which only the extent that a checked
    # layout leaves is known to have.
    return before == outer


def without_trivial_axes(placements: Placements, sizes: tuple[int, ...]) -> Placements:
    """Replace the placement of every axis of one coordinate by `Replicate`.

    Such an axis neither shards nor leaves anything to reduce. A flat placement is kept: it also
    says that several dims are one dim of the local tensors.
    """
    return tuple(
        p if n > 1 or is_flat(p) else Replicate() for p, n in zip(placements, sizes, strict=True)
    )


def partial_axes(placements: Placements) -> list[tuple[int, Partial]]:
    """Return the axes whose values are still unreduced, with their placements."""
    return [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Partial)]


# Sums and averages commute with each other. Other pairs of different reductions do not (a maximum
# of sums is not a sum of maxima): there the later mesh axis is the inner one, as with nested
# shards, and is reduced first.
_FAMILY: dict[ReduceOp, str] = {"sum": "linear", "avg": "linear"}


def reduction_family(placement: Partial) -> str:
    """Return the family of a reduction; reductions of one family may be exchanged."""
    return _FAMILY.get(placement.reduce_op, placement.reduce_op)
