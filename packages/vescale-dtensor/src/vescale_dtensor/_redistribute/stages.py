"""The stages of a path: from placements to placements, without any shape.

A stage changes the placements of some axes. Every state between two stages covers the whole tensor,
so each stage is right by itself; which path is taken decides only what is sent (see `search`).

    narrow   Replicate -> Shard, before a reduction, so that less is reduced
    scatter  Partial -> a shard inside what the rank owns: reduce-scatter, of what is needed only
    reduce   every other Partial that has to go: all-reduce
    move     all remaining Shard and Replicate, whatever they are: slice, gather or exchange
    pad      Shard -> Partial: the shard, among identity elements of the reduction
    scale    between Partial(sum) and Partial(avg)
    mask     Replicate -> Partial: kept at coordinate 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Literal

from vescale_dtensor._layout.placements import Partial, ReduceOp, Replicate, Sharded
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

# What every coordinate but one holds where equal values would not survive the reduction.
MASK_FILL: dict[ReduceOp, int] = {"sum": 0, "norm2": 0, "prod": 1}


@dataclass(frozen=True, slots=True)
class Stage:
    """One change of placements.

    Attributes:
        kind: what is done (see the module's docstring).
        before, after: the states.
        axes: those that a reduction runs over, or that are padded.
        op: of the reduction.
        factor: of a scale.
        target: placements at the end of the path, where a pad has to know them.
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
    """The states through which a tensor passes.

    Attributes:
        source, target: placements at the ends.
        sizes: extent of each mesh axis.
        reduced: axes whose reduction is carried out.
        after_reduction: once that is done. Reduced axes that are cut here are scattered to.
        after_move: once everything is where it has to be; axes that will be padded are cut here.
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
        """The path with these placements after its reductions; see the attributes."""
        shard = [axis for axis, p in enumerate(source) if not isinstance(p, Sharded)]
        order = in_mesh_order(after_reduction).innermost(shard)
        for axes in _sharded_together(source, after_reduction, reduction_groups(source, reduced)):
            order = order.innermost(axes)
        return StagePath(source, target, sizes, reduced, order, after_move)

    def stages(self) -> Iterator[Stage]:
        """The stages, in the order in which they run."""
        at = in_mesh_order(self.source)
        for part in (self._reductions, self._move, self._pads, self._scales, self._mask):
            for stage in part(at):
                yield stage
                at = stage.after

    def reductions(self) -> Iterator[Stage]:
        """The stages until everything is summed."""
        return self._reductions(in_mesh_order(self.source))

    def _reductions(self, at: State) -> Iterator[Stage]:
        at = State(at.placements, self.after_reduction.order)
        # One kind of reduction at a time: a maximum of sums is no sum of maxima.
        for groups_of_family in reduction_groups(self.source, self.reduced):
            parts = [self._scattered_and_reduced(axes) for axes in groups_of_family]
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
        """Those of some axes that are scattered, and those that are all-reduced."""
        first = self.source[axes[0]]
        assert isinstance(first, Partial)
        scattered = tuple(
            a for a in axes if isinstance(self.after_reduction.placements[a], Sharded)
        )
        return scattered, tuple(a for a in axes if a not in scattered), first.reduce_op

    def _shards_after_reduction(self, axes: Iterable[int]) -> dict[int, Sharded]:
        found = {axis: self.after_reduction.placements[axis] for axis in axes}
        return {axis: p for axis, p in found.items() if isinstance(p, Sharded)}

    def _to_narrow(self, at: State) -> list[int]:
        pairs = zip(at.placements, self.after_reduction.placements, strict=True)
        return [
            axis
            for axis, (p, q) in enumerate(pairs)
            if isinstance(p, Replicate) and isinstance(q, Sharded)
        ]

    def _with_narrow(self, at: State) -> State:
        return at.replacing(self._shards_after_reduction(self._to_narrow(at)))

    def _outside(self, at: State, axes: Axes) -> State:
        """With the narrow cuts that no scatter over `axes` has to come before."""
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
        # One move, however many axes change: parts of it could only send some elements twice.
        if at != self.after_move:
            yield Stage("move", at, self.after_move)

    def _pads(self, at: State) -> Iterator[Stage]:
        # The inner ones first: outer ones then fill around what these have filled.
        for op, group in groupby(reversed(partial_axes(self.target)), key=lambda item: item[1]):
            changes = {a: p for a, p in group if isinstance(self.after_move.placements[a], Sharded)}
            if changes:
                # What is padded as an average still has to be multiplied.
                after, axes = at.replacing(changes), tuple(sorted(changes))
                yield Stage("pad", at, after, axes, op.reduce_op, target=self.target)
                at = after

    def _scales(self, at: State) -> Iterator[Stage]:
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
        if any(isinstance(p, Replicate) and _needs_mask(q) for p, q in pairs):
            yield Stage("mask", at, in_mesh_order(self.target))


def _needs_mask(placement: object) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in MASK_FILL


ReductionGroups = list[list[Axes]]
"""Axes that are reduced together, by families inside of which their order does not matter."""


def reduction_groups(source: Placements, reduced: frozenset[int]) -> ReductionGroups:
    """The axes that are reduced, those of inner families first."""
    found = [(axis, p) for axis, p in reversed(partial_axes(source)) if axis in reduced]
    return [
        list(_by_op(list(group)))
        for _, group in groupby(found, key=lambda item: reduction_family(item[1]))
    ]


def _by_op(members: list[tuple[int, Partial]]) -> Iterator[Axes]:
    # A dict and not a set: all ranks have to take the same order.
    for op in dict.fromkeys(p.reduce_op for _, p in members):
        yield tuple(sorted(axis for axis, p in members if p.reduce_op == op))


def _sharded_together(
    source: Placements, after_reduction: Placements, together: ReductionGroups
) -> Iterator[Axes]:
    """The axes that are newly cut on the way to `after_reduction`, stage by stage."""
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
    """Partial axes that change, and those inside them that have to be reduced before."""
    reduced: set[int] = set()
    # Outer axes come first, so what one of them forces on an inner one is known when it is met.
    for axis, placement in partial_axes(source):
        outer = (source[a] for a in reduced)
        inside = any(
            isinstance(p, Partial) and reduction_family(p) != reduction_family(placement)
            for p in outer
        )
        if inside or not (target[axis] == placement or _rescales(axis, source, target)):
            reduced.add(axis)
    return frozenset(reduced)


def _rescales(axis: int, source: Placements, target: Placements) -> bool:
    """Whether the terms, multiplied by a number, are those of the target."""
    before, after = source[axis], target[axis]
    if not (isinstance(before, Partial) and isinstance(after, Partial)):
        return False
    if reduction_family(before) != reduction_family(after) or reduction_family(before) != "linear":
        return False
    # A factor does not pass out of a product.
    return Partial("prod") not in (*source, *target)
