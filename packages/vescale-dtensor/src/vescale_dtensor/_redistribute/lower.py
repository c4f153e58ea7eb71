"""Lower stages to the steps of one rank.

Where every coordinate owns one box, steps name boxes and dims, and are carried out by torch's
narrow and cat and by collectives along a dim. All other shards go through `lower_packed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from vescale_dtensor._layout.local_shards import box_shape
from vescale_dtensor._layout.mesh import Coordinate
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Partial, ReduceOp
from vescale_dtensor._layout.shard_geometry import Box
from vescale_dtensor._redistribute.exchange import LocalBox
from vescale_dtensor._redistribute.lower_packed import (
    copy_own,
    packed_exchange,
    packed_gather,
    packed_scatter,
)
from vescale_dtensor._redistribute.ownership import (
    OwnershipMap,
    PlanContext,
    axes_needed,
    offset,
    overlap,
    same_ownership,
)
from vescale_dtensor._redistribute.search import stages
from vescale_dtensor._redistribute.stages import MASK_FILL, Kind, Stage
from vescale_dtensor._redistribute.states import Axes, Placements, shards_of
from vescale_dtensor._redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    GatherPieces,
    Mask,
    Pad,
    ReduceScatter,
    Scale,
    Slice,
    Step,
)


def plan_steps(source: Placements, target: Placements, frame: PlanContext) -> tuple[Step, ...]:
    """Return the steps of the rank of `frame`: `plan_redistribution` without the meshes."""
    ranks = prod(frame.sizes)
    path = stages(source, target, frame.sizes, tuple(n >= ranks for n in frame.shape))
    # `wide` is all that the search reads of the shape: a path serves every shape, steps are per
    # shape. Builders may leave out local steps where a rank has nothing to do, but never a
    # collective: the other members of its group would wait for it.
    return tuple(step for stage in path for step in _BUILDERS[stage.kind](stage, frame))


def _ownership(stage: Stage, frame: PlanContext) -> tuple[OwnershipMap, OwnershipMap]:
    return OwnershipMap(stage.before, frame), OwnershipMap(stage.after, frame)


def _narrow(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Slice replicated axes down to their shards; local."""
    yield _kept(*_ownership(stage, frame), frame)


def _kept(old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Step:
    """Keep what a rank already holds of what it will own; local."""
    if not (old.plain and new.plain):
        return copy_own(old, new, frame)
    source_box = old.box(frame.coordinate)
    # An empty shard may begin anywhere, also outside of what the rank holds.
    kept = overlap(source_box, new.box(frame.coordinate))
    return Slice(start=offset(kept, source_box), shape=box_shape(kept))


def _reduce(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """All-reduce over the axes of the stage."""
    shape = OwnershipMap(stage.before, frame).local_shape(frame.coordinate)
    members = prod(frame.sizes[axis] for axis in stage.axes)
    # Counted as a reduce-scatter and an all-gather, whatever algorithm the backend uses.
    sent = 2 * prod(shape) * frame.itemsize * (members - 1) // members
    yield AllReduce(shape=shape, axes=stage.axes, wire_bytes=sent, op=stage.op)


def _scatter(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Reduce-scatter over the axes of the stage, and slice the axes that it narrows."""
    old, new = _ownership(stage, frame)
    # Shards that are not boxes are scattered in the local tensor, and are packed before sending.
    if not (old.plain and new.plain):
        yield packed_scatter(stage, old, new, frame)
        return
    dim = _scattered_dim(stage)
    # No single dim is split among the members in their order, so what they get is packed, too.
    if dim is None:
        yield packed_scatter(stage, old, new, frame)
        return
    # Extents of all members, also uneven and empty ones: nothing is padded on the wire.
    kept = [new.interval(dim, member) for member in frame.members(stage.axes)]
    whole, shape = (grid.local_shape(frame.coordinate) for grid in (old, new))
    yield ReduceScatter(
        shape=shape,
        axes=stage.axes,
        wire_bytes=(prod(whole) - prod(shape)) * frame.itemsize,
        op=stage.op,
        dim=dim,
        sizes=_unless_even([high - low for low, high in kept]),
    )


def _unless_even(sizes: list[int]) -> tuple[int, ...] | None:
    """Return the members' extents; None if all are equal, which the collectives do faster."""
    return None if 0 < min(sizes) == max(sizes) else tuple(sizes)


def _scattered_dim(stage: Stage) -> int | None:
    """Return the one dim that the members' shards divide in the order of the group, or None."""
    changed = [
        axis
        for axis, (p, q) in enumerate(
            zip(stage.before.placements, stage.after.placements, strict=True)
        )
        if p != q
    ]
    placements = [stage.after.placements[axis] for axis in changed]
    dims = {dim for p in placements if isinstance(p, Sharded) for dim in p.cut_dims()}
    # A stage that also slices sends less than all that is owned, and several dims make no single
    # split.
    if tuple(changed) != stage.axes or len(dims) > 1:
        return None
    (dim,) = dims
    # The scattered axes have to be the inner ones and in ascending order: only then are the
    # members' shards neighbours in the local tensor, in the order of the group.
    order = [axis for axis, _ in shards_of(stage.after, (dim,))]
    return dim if tuple(order[-len(changed) :]) == stage.axes else None


def _move(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Slice, gather or exchange, whichever the ranks together need."""
    # Which of these is decided from all coordinates, never from what this rank lacks itself.
    old, new = _ownership(stage, frame)
    axes = axes_needed(old, new)
    plain = old.plain and new.plain
    if not axes:
        # Asked for all ranks, so that a plan without steps is without steps everywhere.
        if not same_ownership(old, new):
            yield _kept(old, new, frame)
    # Some axis of the group still shards at the end, so the members want different elements.
    elif any(stage.after.placements[axis].is_sharded() for axis in axes):
        yield (_exchange if plain else packed_exchange)(axes, old, new, frame)
    elif plain:
        yield from _gather(axes, old, new, frame)
    else:
        yield packed_gather(axes, old, new, frame)


def _gather(axes: Axes, old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Iterator[Step]:
    """Give every member of the group the same box: each sends its part of it to all others."""
    source_box, whole = old.box(frame.coordinate), new.box(frame.coordinate)
    kept = overlap(source_box, whole)
    # Slice first: what the target does not want should not be sent.
    if kept != source_box:
        yield Slice(start=offset(kept, source_box), shape=box_shape(kept))
    # What is wanted does not depend on `axes`, so `whole` is the box of every member.
    boxes = [overlap(old.box(member), whole) for member in frame.members(axes)]
    sent = (len(boxes) - 1) * prod(box_shape(kept)) * frame.itemsize
    dims = [dim for dim in range(len(frame.shape)) if set(old.sharding_axes((dim,))) & set(axes)]
    shape = box_shape(whole)
    if len(dims) == 1 and _ascending(old.sharding_axes((dims[0],)), axes):
        # The group orders its members as the dim is sharded, so concatenating them restores the
        # dim.
        sizes = _unless_even([box_shape(box)[dims[0]] for box in boxes])
        yield AllGather(shape=shape, axes=axes, wire_bytes=sent, dim=dims[0], sizes=sizes)
    else:
        pieces = tuple(_piece(box, whole) for box in boxes)
        yield GatherPieces(shape=shape, axes=axes, wire_bytes=sent, pieces=pieces)


def _ascending(sharding: Axes, axes: Axes) -> bool:
    """Whether the axes that shard a dim, outermost first, are in the order of the group."""
    found = [axis for axis in sharding if axis in axes]
    return found == sorted(found)


def _exchange(axes: Axes, old: OwnershipMap, new: OwnershipMap, frame: PlanContext) -> Step:
    """Send each member exactly what it lacks."""
    source_box, wanted = old.box(frame.coordinate), new.box(frame.coordinate)
    members = frame.members(axes)
    send = tuple(_piece(overlap(source_box, new.box(member)), source_box) for member in members)
    receive = tuple(_piece(overlap(wanted, old.box(member)), wanted) for member in members)
    # What a rank sends to itself passes through the exchange, but not over the wire.
    others = (s for s, member in zip(send, members, strict=True) if member != frame.coordinate)
    sent = sum(prod(piece.shape) for piece in others) * frame.itemsize
    return AllToAll(
        shape=box_shape(wanted),
        axes=axes,
        wire_bytes=sent,
        before=box_shape(source_box),
        send=send,
        receive=receive,
    )


def _piece(box: Box, inside: Box) -> LocalBox:
    """Express a box of global indices in the coordinates of a box that contains it."""
    return LocalBox(offset(box, inside), box_shape(box))


def _pad(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Surround the local shard with the identity element of the reduction; local."""
    old, new = _ownership(stage, frame)
    around = _padded_reduction(stage, frame.coordinate)
    if old.plain and new.plain:
        kept, whole = (grid.box(frame.coordinate) for grid in (old, new))
        yield Pad(start=offset(kept, whole), shape=box_shape(whole), identity_of=around)
    else:
        yield copy_own(old, new, frame, identity_of=around)


def _padded_reduction(stage: Stage, coordinate: Coordinate) -> ReduceOp:
    """Return the reduction whose identity element a coordinate pads with.

    It is that of the padded axes: of their coordinates, all but one are outside of a given shard.
    But the reductions of the axes inside have to give that same value again, so a sum, say, takes
    it from its coordinate 0 and zeros from the others.
    """
    op = stage.op
    for axis, placement in enumerate(stage.target):
        # Only axes inside the first padded one: outer reductions read the finished value.
        if not isinstance(placement, Partial) or axis <= stage.axes[0]:
            continue
        if placement.reduce_op == "norm2" and op == "max":
            op = "norm2"  # of norms, none of which is below zero
        if placement.reduce_op in MASK_FILL and coordinate[axis] != 0:
            op = placement.reduce_op
    return op


def _scale(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Multiply by the factor of the stage; local."""
    shape = OwnershipMap(stage.after, frame).local_shape(frame.coordinate)
    yield Scale(shape=shape, factor=stage.factor)


def _mask(stage: Stage, frame: PlanContext) -> Iterator[Step]:
    """Keep the values on coordinate 0 and replace them elsewhere; local."""
    shape = OwnershipMap(stage.after, frame).local_shape(frame.coordinate)
    yield Mask(shape=shape, fill=_fill(stage, frame.coordinate))


def _fill(stage: Stage, coordinate: Coordinate) -> int | None:
    """Return the neutral value that a coordinate is filled with; None where it keeps its values.

    Axes are looked at from the outermost reduction to the innermost. Coordinate 0 of an axis keeps
    what it has. Where an outer product has filled a coordinate with 1, the sums inside need zeros
    on all coordinates but 0, also sums that were partial before the mask.
    """
    fill: int | None = None
    for axis, placement in enumerate(stage.after.placements):
        if not isinstance(placement, Partial) or coordinate[axis] == 0:
            continue
        if fill is None and stage.before.placements[axis] == placement:
            continue  # was partial before and stays so: its values are not to be touched
        fill = MASK_FILL.get(placement.reduce_op, fill)
    return fill


_BUILDERS: dict[Kind, Callable[[Stage, PlanContext], Iterator[Step]]] = {
    "narrow": _narrow,
    "scatter": _scatter,
    "reduce": _reduce,
    "move": _move,
    "pad": _pad,
    "scale": _scale,
    "mask": _mask,
}
