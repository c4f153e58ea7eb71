"""Stages of a redistribution: changes from one state to the next, independent of the shape.

A stage changes the placements of some axes. Every state between two stages still determines all
elements of the tensor, so each stage is correct by itself, and the chosen path decides only how
many bytes are sent (see `search`). The stages of a path, in the order in which they run:

    narrow   Replicate -> Shard, before a reduction, so that less has to be reduced
    scatter  Partial -> a shard inside what the rank owns: reduce-scatter of what is needed only
    reduce   every other Partial that has to be reduced: all-reduce
    move     all remaining Shard and Replicate changes at once: slice, gather or exchange
    pad      Shard -> Partial: the shard, surrounded by identity elements of the reduction
    scale    between Partial(sum) and Partial(avg)
    mask     Replicate -> Partial: the values stay on coordinate 0 only
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Literal

from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Partial, ReduceOp, Replicate
from vescale_dtensor._redistribute.states import (
    Axes,
    Placements,
    State,
    in_mesh_order,
    partial_axes,
    reduction_family,
    shards_of,
)

Kind = Literal["narrow", "scatter", "reduce", "move", "pad", "scale", "mask"]

# Fill value for all coordinates but 0 when a replicated tensor becomes partial. Reductions not
# listed (max, min, avg) leave equal values as they are, so there nothing has to be filled.
MASK_FILL: dict[ReduceOp, int] = {"sum": 0, "norm2": 0, "prod": 1}


@dataclass(frozen=True, slots=True)
class Stage:
    """One change of placements.

    Attributes:
        kind: what is done (see the docstring of the module).
        before, after: the states.
        axes: the axes that are reduced over, or that are padded.
        op: the reduction.
        factor: the factor of a scale.
        target: placements at the end of the path; a pad has to know which reductions follow it.
    """

    kind: Kind
    before: State
    after: State
    axes: Axes = ()
    op: ReduceOp = "sum"
    factor: Fraction = Fraction(1)
    target: Placements = ()


@dataclass(frozen=True, slots=True)
class StagePath:
    """The states through which a tensor passes from `source` to `target`.

    Attributes:
        source, target: placements at the ends.
        sizes: extent of each mesh axis.
        reduced: axes whose reduction is carried out.
        after_reduction: the state once all reductions are done. Reduced axes that shard here are
            reduce-scattered, the others all-reduced.
        after_move: the state once every element is where it has to be; axes that will be padded
            still shard here.
    """

    source: Placements
    target: Placements
    sizes: tuple[int, ...]
    reduced: frozenset[int]
    after_reduction: State
    after_move: State

    @staticmethod
    def through(
        source: Placements,
        target: Placements,
        sizes: tuple[int, ...],
        reduced: frozenset[int],
        after_reduction: Placements,
        after_move: State,
    ) -> StagePath:
        """Make the path that has these placements after its reductions; see the attributes."""
        # Local tensors are sharded by the source's axes already, so whatever is sharded on the way
        # is inside of these; among the new ones, what an earlier stage shards is outside.
        shard = [axis for axis, p in enumerate(source) if not isinstance(p, Sharded)]
        order = in_mesh_order(after_reduction).innermost(shard)
        for axes in _sharded_together(source, after_reduction, reduction_groups(source, reduced)):
            order = order.innermost(axes)
        return StagePath(source, target, sizes, reduced, order, after_move)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages, in the order in which they run."""
        at = in_mesh_order(self.source)
        # Reductions come first, so that the move sends reduced values. Padding and masking come
        # last, since what they fill in is not to be sent.
        for part in (self._reductions, self._move, self._pads, self._scales, self._mask):
            for stage in part(at):
                yield stage
                at = stage.after

    def reductions(self) -> Iterator[Stage]:
        """Yield the stages up to and including the last reduction."""
        return self._reductions(in_mesh_order(self.source))

    def _reductions(self, at: State) -> Iterator[Stage]:
        # The final order holds from the start. Only the source's shards exist at this point, and
        # their order among themselves is that of the mesh in either.
        at = State(at.placements, self.after_reduction.order)
        # One family at a time, inner ones first: a maximum of sums is not a sum of maxima.
        for groups_of_family in reduction_groups(self.source, self.reduced):
            parts = [self._scattered_and_reduced(axes) for axes in groups_of_family]
            # Scatters first, then narrowing, then all-reduces: each leaves less for what follows
            # it.
            for axes, _, op in parts:
                if not axes:
                    continue
                yield from self._narrowed(at, axes)
                after = self._with_narrow(at).replacing(self._shards_after_reduction(axes))
                yield Stage("scatter", self._outside(at, axes), after, axes, op)
                at = after
            if self._to_narrow(at):
                yield from self._narrowed(at, ())
                at = self._with_narrow(at)
            for _, axes, op in parts:
                if not axes:
                    continue
                after = at.replacing({axis: Replicate() for axis in axes})
                yield Stage("reduce", at, after, axes, op)
                at = after

    def _scattered_and_reduced(self, axes: Axes) -> tuple[Axes, Axes, ReduceOp]:
        """Split the axes of one reduction into scattered and all-reduced ones, and name its op."""
        first = self.source[axes[0]]
        assert isinstance(first, Partial)
        # All of `axes` have one reduction (see `_by_op`), so the first tells it for all.
        scattered = tuple(
            a for a in axes if isinstance(self.after_reduction.placements[a], Sharded)
        )
        return scattered, tuple(a for a in axes if a not in scattered), first.reduce_op

    def _shards_after_reduction(self, axes: Iterable[int]) -> dict[int, Sharded]:
        found = {axis: self.after_reduction.placements[axis] for axis in axes}
        return {axis: p for axis, p in found.items() if isinstance(p, Sharded)}

    def _to_narrow(self, at: State) -> list[int]:
        """Axes that are still replicated in `at` and shard once the reductions are done."""
        pairs = zip(at.placements, self.after_reduction.placements, strict=True)
        return [
            axis
            for axis, (p, q) in enumerate(pairs)
            if isinstance(p, Replicate) and isinstance(q, Sharded)
        ]

    def _with_narrow(self, at: State) -> State:
        return at.replacing(self._shards_after_reduction(self._to_narrow(at)))

    def _outside(self, at: State, axes: Axes) -> State:
        """Apply the narrow shards that are not inside a shard which scattering `axes` makes.

        Those inside are made by the scatter itself, which then sends less than the rank holds.
        """
        coming = self._with_narrow(at).replacing(self._shards_after_reduction(axes))
        outside = []
        for axis in self._to_narrow(at):
            shard = self.after_reduction.placements[axis]
            assert isinstance(shard, Sharded)
            order = [a for a, _ in shards_of(coming, shard.cut_dims())]
            if not set(order[: order.index(axis)]) & set(axes):
                outside.append(axis)
        return at.replacing(self._shards_after_reduction(outside))

    def _narrowed(self, at: State, axes: Axes) -> Iterator[Stage]:
        outside = self._outside(at, axes)
        if outside != at:
            yield Stage("narrow", at, outside)

    def _move(self, at: State) -> Iterator[Stage]:
        # One exchange, however many axes change: split up, some elements would be sent twice.
        if at != self.after_move:
            yield Stage("move", at, self.after_move)

    def _pads(self, at: State) -> Iterator[Stage]:
        # Inner reductions first: what an outer one fills surrounds what the inner ones have filled.
        for op, group in groupby(reversed(partial_axes(self.target)), key=lambda item: item[1]):
            changes = {a: p for a, p in group if isinstance(self.after_move.placements[a], Sharded)}
            if changes:
                # An average of a shard and zeros is too small by the number of coordinates;
                # `_scales` multiplies by it.
                after, axes = at.replacing(changes), tuple(sorted(changes))
                yield Stage("pad", at, after, axes, op.reduce_op, target=self.target)
                at = after

    def _scales(self, at: State) -> Iterator[Stage]:
        # One factor for all axes, and exact: sizes multiply and divide, and may cancel.
        factor = Fraction(1)
        for axis, (p, q) in enumerate(zip(self.after_move.placements, self.target, strict=True)):
            if q == Partial("avg") and (isinstance(p, Sharded) or p == Partial("sum")):
                factor *= self.sizes[axis]
            elif q == Partial("sum") and p == Partial("avg"):
                factor /= self.sizes[axis]
        if factor != 1:
            after = at.replacing({a: self.target[a] for a, p in partial_axes(at.placements)})
            yield Stage("scale", at, after, factor=factor)

    def _mask(self, at: State) -> Iterator[Stage]:
        pairs = zip(at.placements, self.target, strict=True)
        # One stage for all axes: which value a coordinate is filled with depends on all of them.
        # Where a replicated axis becomes max, min or avg, the tensor is right as it is.
        if any(isinstance(p, Replicate) and _needs_mask(q) for p, q in pairs):
            yield Stage("mask", at, in_mesh_order(self.target))


def _needs_mask(placement: object) -> bool:
    """Whether replicated values would be counted several times by this placement's reduction."""
    return isinstance(placement, Partial) and placement.reduce_op in MASK_FILL


ReductionGroups = list[list[Axes]]
"""Axes that are reduced together, by families inside of which their order does not matter."""


def reduction_groups(source: Placements, reduced: frozenset[int]) -> ReductionGroups:
    """Group the axes that are reduced by family and op, inner families first."""
    # Only neighbouring axes of one family are grouped: between sums with a maximum in between the
    # order matters.
    found = [(axis, p) for axis, p in reversed(partial_axes(source)) if axis in reduced]
    return [
        list(_by_op(list(group)))
        for _, group in groupby(found, key=lambda item: reduction_family(item[1]))
    ]


def _by_op(members: list[tuple[int, Partial]]) -> Iterator[Axes]:
    # A dict and not a set: all ranks have to issue the collectives in the same order.
    for op in dict.fromkeys(p.reduce_op for _, p in members):
        yield tuple(sorted(axis for axis, p in members if p.reduce_op == op))


def _sharded_together(
    source: Placements, after_reduction: Placements, together: ReductionGroups
) -> Iterator[Axes]:
    """Yield the axes that become sharded together on the way to `after_reduction`, by stage."""
    # Replicated axes shard with the first scatter: narrowing comes before it, or is part of it.
    narrowed = [a for a, p in enumerate(source) if isinstance(p, Replicate)]
    for groups_of_family in together:
        for axes in groups_of_family:
            scattered = [a for a in axes if isinstance(after_reduction[a], Sharded)]
            if scattered:
                yield tuple(sorted([*narrowed, *scattered]))
                narrowed = []
        if narrowed:
            yield tuple(narrowed)
            narrowed = []


def to_reduce(source: Placements, target: Placements) -> frozenset[int]:
    """Return the partial axes that change, and those inside them that must be reduced before."""
    reduced: set[int] = set()
    # Outer axes first, so that what one of them forces on an inner one is known when the inner one
    # is met.
    for axis, placement in partial_axes(source):
        outer = (source[a] for a in reduced)
        # An inner value of another family has to be final before an outer reduction reads it, also
        # where the target keeps it partial.
        inside = any(
            isinstance(p, Partial) and reduction_family(p) != reduction_family(placement)
            for p in outer
        )
        if inside or not (target[axis] == placement or _rescales(axis, source, target)):
            reduced.add(axis)
    return frozenset(reduced)


def _rescales(axis: int, source: Placements, target: Placements) -> bool:
    """Whether multiplying the partial values by a number makes them those of the target."""
    before, after = source[axis], target[axis]
    if not (isinstance(before, Partial) and isinstance(after, Partial)):
        return False
    if reduction_family(before) != reduction_family(after) or reduction_family(before) != "linear":
        return False
    # A factor does not pass out of a product: scaling one of n factors is not scaling each.
    return Partial("prod") not in (*source, *target)
