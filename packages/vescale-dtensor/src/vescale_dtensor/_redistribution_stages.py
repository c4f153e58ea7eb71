"""The road from one tuple of placements to another: stages, without any shape.

A stage changes the placements of some axes. Every state between two stages is a tuple of placements
that covers the whole tensor, so each stage is right by itself; their choice only decides what is
sent. The order is: shrink, reduce, move, and last what costs nothing.

    narrow   Replicate -> Shard before a reduction, so that less is reduced
    scatter  Partial -> Shard where the cut is inside what the rank holds: reduce-scatter
    reduce   every other Partial that has to go: all-reduce
    move     all remaining Shard and Replicate, whatever they are: slice, gather or exchange
    pad      Shard -> Partial(sum): the piece, in zeros
    mask     Replicate -> Partial: kept at coordinate 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

from vescale_dtensor._placements import (
    Partial,
    Placement,
    ReduceOp,
    Replicate,
    Sharded,
    is_flat,
)

Placements = tuple[Placement, ...]
Axes = tuple[int, ...]
Dims = tuple[int, ...]
Cuts = tuple[tuple[int, Sharded], ...]
Kind = Literal["narrow", "scatter", "reduce", "move", "pad", "mask"]

# Sums and averages may be taken in any order. Every other pair of different reductions may not:
# there the later mesh axis is the inner one, as with nested shards, and is reduced first.
_FAMILY: dict[ReduceOp, str] = {"sum": "linear", "avg": "linear"}
# What every coordinate but one holds where equal values would not survive the reduction.
NEUTRAL: dict[ReduceOp, int] = {"sum": 0, "norm2": 0, "prod": 1}


@dataclass(frozen=True, slots=True)
class Stage:
    """One change of placements.

    Attributes:
        kind: what is done (see the module's docstring).
        before, after: placements of all axes.
        axes: those that a reduction runs over.
        op: of a reduction.
    """

    kind: Kind
    before: Placements
    after: Placements
    axes: Axes = ()
    op: ReduceOp = "sum"


def cuts(placements: Placements, dims: Dims) -> Cuts:
    """The axes that cut any of `dims`, outermost first, and how."""
    return tuple(
        (axis, p)
        for axis, p in enumerate(placements)
        if isinstance(p, Sharded) and not set(dims).isdisjoint(p.cut_dims())
    )


@lru_cache(maxsize=4096)
def stages(source: Placements, target: Placements, sizes: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages that lead from `source` to `target` on a mesh of those sizes."""
    source, target = effective(source, sizes), effective(target, sizes)
    reduced = _to_reduce(source, target)
    padded = _to_pad(source, target)
    moved = tuple(
        _before_local_end(axis, source, target, reduced, padded) for axis in range(len(sizes))
    )
    road = _joined(_reductions(source, moved, reduced))
    at = road[-1].after if road else source
    # One move, however many axes change: parts of it could only send some elements twice.
    if at != moved:
        road.append(Stage("move", at, moved))
    whole = _put(moved, {axis: Partial() for axis in padded})
    if padded:
        road.append(Stage("pad", moved, whole))
    if any(
        p != whole[a] and p.is_partial() and p.reduce_op in NEUTRAL for a, p in _partials(target)
    ):
        road.append(Stage("mask", whole, target))
    return tuple(road)


def effective(placements: Placements, sizes: tuple[int, ...]) -> Placements:
    """An axis of one coordinate neither cuts nor owes anything, whatever it is called.

    It may still say that several dims lie as one in the local tensors.
    """
    return tuple(
        p if n > 1 or is_flat(p) else Replicate() for p, n in zip(placements, sizes, strict=True)
    )


def _partials(placements: Placements) -> list[tuple[int, Partial]]:
    return [(axis, p) for axis, p in enumerate(placements) if isinstance(p, Partial)]


def _family(placement: Partial) -> str:
    return _FAMILY.get(placement.reduce_op, placement.reduce_op)


def _to_reduce(source: Placements, target: Placements) -> frozenset[int]:
    """Partial axes that change, and those inside them that have to be reduced before."""
    reduced: set[int] = set()
    # Outer axes come first, so what one of them forces on an inner one is known when it is met.
    for axis, placement in _partials(source):
        outer = (source[a] for a in reduced)
        inside = any(isinstance(p, Partial) and _family(p) != _family(placement) for p in outer)
        if inside or target[axis] != placement:
            reduced.add(axis)
    return frozenset(reduced)


def _to_pad(source: Placements, target: Placements) -> Axes:
    """Axes from Shard to Partial(sum) whose pieces tile what the target holds along their dim."""
    padded: list[int] = []
    reached = target
    for axis, placement in _partials(target):
        cut = source[axis]
        if placement != Partial() or not isinstance(cut, Sharded):
            continue
        # Zeros around a piece need the piece to be cut from what the target holds there: the same
        # outer cuts, and none inside it.
        outer = tuple(c for c in cuts(source, cut.cut_dims()) if c[0] < axis)
        if cuts(reached, cut.cut_dims()) == outer:
            padded.append(axis)
            reached = _put(reached, {axis: cut})
    return tuple(padded)


def _before_local_end(
    axis: int, source: Placements, target: Placements, reduced: frozenset[int], padded: Axes
) -> Placement:
    """Placement of an axis once everything is sent, before pads and masks."""
    if axis in padded:
        return source[axis]
    if not isinstance(target[axis], Partial):
        return target[axis]
    return target[axis] if source[axis] == target[axis] and axis not in reduced else Replicate()


def _reductions(source: Placements, goal: Placements, reduced: frozenset[int]) -> Iterator[Stage]:
    if not reduced:
        return  # a move slices by itself what it sends
    at = source
    # Slices before everything: they cost nothing, and all that follows gets smaller.
    for stage in _narrows(at, goal):
        yield stage
        at = stage.after
    for stage in _scatters(at, goal):
        yield stage
        at = stage.after
    for axes, op in _runs(at, reduced):
        after = _put(at, {axis: Replicate() for axis in axes})
        yield Stage("reduce", at, after, axes, op)
        at = after


def _narrows(at: Placements, goal: Placements) -> Iterator[Stage]:
    for axis in range(len(at)):
        if isinstance(at[axis], Replicate) and _inside(at, goal, axis):
            after = _put(at, {axis: goal[axis]})
            yield Stage("narrow", at, after)
            at = after


def _scatters(at: Placements, goal: Placements) -> Iterator[Stage]:
    """Reduce-scatters, from the outer cuts to the inner ones, with the slices between them."""
    for axis in range(len(at)):
        before, after = at[axis], _put(at, {axis: goal[axis]})
        if not _inside(at, goal, axis):
            continue
        if isinstance(before, Replicate):
            yield Stage("narrow", at, after)
        # What may not be scattered is all-reduced afterwards, and cut by the move.
        elif isinstance(before, Partial) and not _has_inner(at, axis):
            yield Stage("scatter", at, after, (axis,), before.reduce_op)
        else:
            continue
        at = after


def _inside(at: Placements, goal: Placements, axis: int) -> bool:
    """Whether the goal's cut on `axis` cuts, first or next, what the ranks hold along its dims."""
    placement = goal[axis]
    if not isinstance(placement, Sharded):
        return False
    dims = placement.cut_dims()
    # Any other cut of them would make ranks give away elements that they need again later.
    return cuts(at, dims) == tuple(cut for cut in cuts(goal, dims) if cut[0] < axis)


def _has_inner(at: Placements, axis: int) -> bool:
    """Whether a reduction inside that of `axis` is still owed, and may not be swapped with it."""
    own = at[axis]
    assert isinstance(own, Partial)
    return any(a > axis and _family(p) != _family(own) for a, p in _partials(at))


def _runs(at: Placements, reduced: frozenset[int]) -> Iterator[tuple[Axes, ReduceOp]]:
    """Axes that one all-reduce takes together, inner families first."""
    owed = [(axis, p) for axis, p in reversed(_partials(at)) if axis in reduced]
    for _, family in groupby(owed, key=lambda item: _family(item[1])):
        members = list(family)
        # A dict and not a set: all ranks have to take the same order.
        for op in dict.fromkeys(p.reduce_op for _, p in members):
            yield tuple(sorted(axis for axis, p in members if p.reduce_op == op)), op


def _joined(road: Iterable[Stage]) -> list[Stage]:
    """Neighbours that one step can do, as one stage."""
    result: list[Stage] = []
    for stage in road:
        last = result[-1] if result else None
        if last is not None and _joins(last, stage):
            result[-1] = replace(last, after=stage.after, axes=last.axes + stage.axes)
        else:
            result.append(stage)
    return result


def _joins(first: Stage, second: Stage) -> bool:
    if first.kind != second.kind or first.kind not in ("narrow", "scatter"):
        return False
    # Nested cuts of one dim are one cut over the flattened group; cuts of two dims are not.
    placements = [stage.after[axis] for stage in (first, second) for axis in stage.axes]
    dims = {p.cut_dims() for p in placements if isinstance(p, Sharded)}
    return first.op == second.op and len(dims) <= 1


def _put(placements: Placements, changes: dict[int, Placement]) -> Placements:
    return tuple(changes.get(axis, p) for axis, p in enumerate(placements))
