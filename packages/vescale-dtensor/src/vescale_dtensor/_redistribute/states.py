"""The state between two steps of a redistribution: placements, and which axis shards first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vescale_dtensor._layout.placements import (
    Intervals,
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Shard,
    Sharded,
    StridedShard,
    is_flat,
)

Placements = tuple[Placement, ...]
Axes = tuple[int, ...]
Dims = tuple[int, ...]
AxisShards = tuple[tuple[int, Sharded], ...]


class State(NamedTuple):
    """Placements of all axes, and the order in which they cut.

    A layout always cuts in mesh order. On the way to it an axis may cut inside of a later one: what
    a rank holds of a partial sum can only be cut further.

    Attributes:
        placements: one per mesh axis.
        order: all axes, the one that cuts first in front.
    """

    placements: Placements
    order: Axes

    def replacing(self, changes: Mapping[int, Placement]) -> State:
        """The same order, other placements on some axes."""
        return self._replace(placements=replace_placements(self.placements, changes))

    def innermost(self, axes: Iterable[int]) -> State:
        """The same placements; these axes cut after all others, in the order given."""
        last = tuple(axes)
        return self._replace(order=(*(a for a in self.order if a not in last), *last))


@dataclass(frozen=True, slots=True)
class UnclippedShard(Sharded):
    """A cut of the whole dim, laid over what other axes have left of it.

    Some coordinates may be left with nothing. It is no layout, but where a sum goes that ends in
    two cuts of one dim, or comes from them: every element to a rank that has a use for it.
    """

    shard: Sharded

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        (dim,) = self.shard.cut_dims()
        return dim

    def cut_dims(self) -> tuple[int, ...]:
        """Return the dim of the cut."""
        return self.shard.cut_dims()

    def pieces(self, extent: int, count: int) -> tuple[Intervals, ...]:
        """Intervals of the whole dim, of `extent`, that each of `count` coordinates may hold."""
        return self.shard.pieces(extent, count)


def in_mesh_order(placements: Placements) -> State:
    """The state of a layout."""
    return State(placements, tuple(range(len(placements))))


def replace_placements(placements: Placements, changes: Mapping[int, Placement]) -> Placements:
    """Placements with those of some axes replaced."""
    return tuple(changes.get(axis, p) for axis, p in enumerate(placements))


def shards_of(state: State, dims: Dims) -> AxisShards:
    """The axes that cut any of `dims`, outermost first, and how."""
    found = []
    for axis in state.order:
        placement = state.placements[axis]
        if isinstance(placement, Sharded) and not set(dims).isdisjoint(placement.cut_dims()):
            found.append((axis, placement))
    return tuple(found)


def admits_shard(state: State, shard: Sharded, outer: AxisShards) -> bool:
    """Whether `shard` can be put inside of what `state` leaves of its dims, whatever the shape.

    Args:
        state: where it is put.
        shard: the cut.
        outer: the cuts of its dims inside of which it is known to fit.
    """
    before = shards_of(state, shard.cut_dims())
    if isinstance(shard, Shard | StridedShard | UnclippedShard):
        return not any(is_flat(placement) for _, placement in before)
    return before == outer


def without_trivial_axes(placements: Placements, sizes: tuple[int, ...]) -> Placements:
    """An axis of one coordinate neither cuts nor owes anything, whatever it is called.

    It may still say that several dims lie as one in the local tensors.
    """
    return tuple(
        p if n > 1 or is_flat(p) else Replicate() for p, n in zip(placements, sizes, strict=True)
    )


def partial_axes(placements: Placements) -> list[tuple[int, Partial]]:
    """The axes that owe a reduction."""
    return [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Partial)]


# Sums and averages may be taken in any order. Every other pair of different reductions may not:
# there the later mesh axis is the inner one, as with nested shards, and is reduced first.
_FAMILY: dict[ReduceOp, str] = {"sum": "linear", "avg": "linear"}


def reduction_family(placement: Partial) -> str:
    """Reductions of one family may change places."""
    return _FAMILY.get(placement.reduce_op, placement.reduce_op)
