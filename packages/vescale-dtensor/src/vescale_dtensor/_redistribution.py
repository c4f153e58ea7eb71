"""Plans of redistributions: which steps bring a tensor from one layout to another.

Planning is pure: it looks at placements, sizes and the shape, never at data, and asks nobody. What
it decides it decides from facts that are the same on every rank, so all ranks take the same
collectives, also those that hold nothing. `_redistribution_stages` chooses the road without looking
at the shape; here it becomes the steps of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._layout import Box, Layout, Shape, box_shape, local_shape
from vescale_dtensor._mesh import Coordinate, axis_names, describe
from vescale_dtensor._placements import Partial, RaggedShard, Shard
from vescale_dtensor._redistribution_boxes import Frame, Grid, axes_needed, equal, offset, overlap
from vescale_dtensor._redistribution_stages import (
    NEUTRAL,
    Axes,
    Kind,
    Placements,
    Stage,
    cuts,
    stages,
)
from vescale_dtensor._redistribution_steps import (
    AllGather,
    AllReduce,
    AllToAll,
    GatherPieces,
    Mask,
    Pad,
    Piece,
    ReduceScatter,
    Slice,
    Step,
)


@dataclass(frozen=True, slots=True)
class RedistributionPlan:
    """What this rank does to bring its local tensor from `source` to `target`.

    `str` of it is a table: what is done, over which axes, the local shape afterwards, bytes sent.

    Attributes:
        source, target: the layouts.
        shape: global shape.
        steps: in the order in which they run.
        ends_in_view: whether the result is a part of what some tensor held before, not yet copied.
    """

    source: Layout
    target: Layout
    shape: Shape
    steps: tuple[Step, ...]
    ends_in_view: bool

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of both layouts."""
        return self.source.mesh

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends, as `vescale_comm.trace` counts them.

        Dtypes that a backend reduces only as another one (int16 as int32) weigh more there.
        """
        return sum(step.wire_bytes for step in self.steps)

    @property
    def collectives(self) -> int:
        """Number of collectives, the same on every rank."""
        return sum(bool(step.axes) for step in self.steps)

    def __str__(self) -> str:
        names = axis_names(self.mesh)
        head = (
            f"{list(self.shape)} on {describe(self.mesh)}: {list(self.source.placements)}"
            f" -> {list(self.target.placements)}"
        )
        rows = [("local", "", local_shape(self.source, self.shape), "")]
        for step in self.steps:
            over = ", ".join(names[axis] for axis in step.axes)
            rows.append((step.title, over, step.shape, f"{step.wire_bytes:,} B" if over else ""))
        lines = [
            f"  {what:<28}{over:<12}{list(at)!s:<20}{sent:>14}" for what, over, at, sent in rows
        ]
        return "\n".join([head, *(line.rstrip() for line in lines)])


@lru_cache(maxsize=4096)
def plan_redistribution(
    source: Layout, target: Layout, shape: Shape, itemsize: int = 4
) -> RedistributionPlan:
    """The plan from `source` to `target` for a tensor of global `shape`.

    Memory orders are ignored. The plan has no steps if no rank has anything to do.

    Raises:
        MeshError: the layouts are on different meshes.
        LayoutError: a ragged cut that does not fit the shape.
    """
    if source.mesh != target.mesh:
        raise MeshError(
            f"redistribution from {describe(source.mesh)} to {describe(target.mesh)}: "
            "the layouts have to be on the same mesh"
        )
    frame = Frame(source.sizes, shape, source.coordinate, itemsize)
    steps = plan_steps(source.placements, target.placements, frame)
    return RedistributionPlan(source, target, shape, steps, _ends_in_view(steps))


def _ends_in_view(steps: tuple[Step, ...]) -> bool:
    touching = [step for step in steps if not (isinstance(step, Mask) and step.fill is None)]
    return not touching or isinstance(touching[-1], Slice)


def plan_steps(source: Placements, target: Placements, frame: Frame) -> tuple[Step, ...]:
    """The steps of the rank of `frame`: the core of `plan_redistribution`, without a mesh."""
    road = stages(source, target, frame.sizes)
    # Builders may leave local steps out where a rank has nothing to do, but never a collective.
    return tuple(step for stage in road for step in _BUILDERS[stage.kind](stage, frame))


def cost(source: Layout, target: Layout, shape: Shape, itemsize: int = 4) -> float:
    """Bytes that a rank sends on average, as if every cut were even.

    A closed form for choosing between candidates: 0 for what needs no communication. It does not
    look at the shape's cuts, so an even cut that is called ragged counts as another one.
    """
    if source.placements == target.placements:
        return 0.0
    return _share_sent(source, target) * prod(shape) * itemsize


@lru_cache(maxsize=8192)
def _share_sent(source: Layout, target: Layout) -> float:
    """Bytes sent per byte of the whole tensor."""
    sizes = source.sizes
    return sum(
        _share_of(stage, sizes) for stage in stages(source.placements, target.placements, sizes)
    )


def _share_of(stage: Stage, sizes: tuple[int, ...]) -> float:
    held, members = _share_held(stage.before, sizes), prod(sizes[axis] for axis in stage.axes)
    if stage.kind == "reduce":
        return 2 * held * (members - 1) / members
    if stage.kind == "scatter":
        return held * (members - 1) / members
    if stage.kind == "move":
        # What arrives is what a rank will hold without the part that it has. Along a dim it has
        # one part in as many as there are coordinates on the axes that no longer cut it.
        lost = prod(sizes[axis] for axis in _axes_lost(stage))
        return _share_held(stage.after, sizes) * (lost - 1) / lost
    return 0.0


def _share_held(placements: Placements, sizes: tuple[int, ...]) -> float:
    pieces = (n for p, n in zip(placements, sizes, strict=True) if p.is_shard())
    return 1.0 / prod(pieces)


def _axes_lost(stage: Stage) -> Iterator[int]:
    """Axes whose cuts the stage undoes, because they or an outer cut of their dim change."""
    for dim in {p.dim for p in stage.before if isinstance(p, Shard | RaggedShard)}:
        before, after = cuts(stage.before, dim), cuts(stage.after, dim)
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        yield from (axis for axis, _ in before[common:])


def _narrow(stage: Stage, frame: Frame) -> Iterator[Step]:
    old, new = (Grid(p, frame).box(frame.coordinate) for p in (stage.before, stage.after))
    # An empty piece may lie anywhere, also outside of what the rank holds.
    kept = overlap(old, new)
    yield Slice(start=offset(kept, old), shape=box_shape(kept))


def _reduce(stage: Stage, frame: Frame) -> Iterator[Step]:
    shape = box_shape(Grid(stage.before, frame).box(frame.coordinate))
    members = prod(frame.sizes[axis] for axis in stage.axes)
    # As a reduce-scatter and an all-gather, whatever the backend does.
    sent = 2 * prod(shape) * frame.itemsize * (members - 1) // members
    yield AllReduce(shape=shape, axes=stage.axes, wire_bytes=sent, op=stage.op)


def _scatter(stage: Stage, frame: Frame) -> Iterator[Step]:
    old, new = Grid(stage.before, frame), Grid(stage.after, frame)
    cut = stage.after[stage.axes[0]]
    assert isinstance(cut, Shard | RaggedShard)
    kept = (new.interval(cut.dim, member) for member in frame.members(stage.axes))
    whole, shape = (box_shape(grid.box(frame.coordinate)) for grid in (old, new))
    yield ReduceScatter(
        shape=shape,
        axes=stage.axes,
        wire_bytes=(prod(whole) - prod(shape)) * frame.itemsize,
        op=stage.op,
        dim=cut.dim,
        sizes=tuple(high - low for low, high in kept),
    )


def _move(stage: Stage, frame: Frame) -> Iterator[Step]:
    old, new = Grid(stage.before, frame), Grid(stage.after, frame)
    axes = axes_needed(old, new)
    if not axes:
        # Asked for all ranks, so that a plan without steps has none anywhere.
        if not equal(old, new):
            yield from _narrow(stage, frame)
    elif any(stage.after[axis].is_shard() for axis in axes):
        yield _exchange(axes, old, new, frame)
    else:
        yield from _gather(axes, old, new, frame)


def _gather(axes: Axes, old: Grid, new: Grid, frame: Frame) -> Iterator[Step]:
    """All members will hold the same box: each sends its part of it to all others."""
    held, whole = old.box(frame.coordinate), new.box(frame.coordinate)
    own = overlap(held, whole)
    if own != held:
        yield Slice(start=offset(own, held), shape=box_shape(own))
    # The box that is wanted does not depend on `axes`, so `whole` is that of every member.
    boxes = [overlap(old.box(member), whole) for member in frame.members(axes)]
    sent = (len(boxes) - 1) * prod(box_shape(own)) * frame.itemsize
    dims = [dim for dim in range(len(frame.shape)) if set(old.cutters(dim)) & set(axes)]
    shape = box_shape(whole)
    if len(dims) == 1:
        # Members are in the order of the cuts, so their pieces are in the order of the dim.
        sizes = tuple(box_shape(box)[dims[0]] for box in boxes)
        yield AllGather(shape=shape, axes=axes, wire_bytes=sent, dim=dims[0], sizes=sizes)
    else:
        pieces = tuple(_piece(box, whole) for box in boxes)
        yield GatherPieces(shape=shape, axes=axes, wire_bytes=sent, pieces=pieces)


def _exchange(axes: Axes, old: Grid, new: Grid, frame: Frame) -> Step:
    """Exactly what each member lacks goes to it, and nothing else."""
    held, wanted = old.box(frame.coordinate), new.box(frame.coordinate)
    members = frame.members(axes)
    send = tuple(_piece(overlap(held, new.box(member)), held) for member in members)
    receive = tuple(_piece(overlap(wanted, old.box(member)), wanted) for member in members)
    others = (s for s, member in zip(send, members, strict=True) if member != frame.coordinate)
    sent = sum(prod(piece.shape) for piece in others) * frame.itemsize
    return AllToAll(shape=box_shape(wanted), axes=axes, wire_bytes=sent, send=send, receive=receive)


def _piece(box: Box, inside: Box) -> Piece:
    return Piece(offset(box, inside), box_shape(box))


def _pad(stage: Stage, frame: Frame) -> Iterator[Step]:
    own, whole = (Grid(p, frame).box(frame.coordinate) for p in (stage.before, stage.after))
    yield Pad(start=offset(own, whole), shape=box_shape(whole))


def _mask(stage: Stage, frame: Frame) -> Iterator[Step]:
    shape = box_shape(Grid(stage.after, frame).box(frame.coordinate))
    yield Mask(shape=shape, fill=_fill(stage, frame.coordinate))


def _fill(stage: Stage, coordinate: Coordinate) -> int | None:
    """The neutral value that a coordinate holds, from the outer reduction to the inner one.

    Coordinate 0 keeps what it has. Inside a term that is 1 a sum needs its zeros too, also a sum
    that was there before.
    """
    fill: int | None = None
    for axis, placement in enumerate(stage.after):
        if not isinstance(placement, Partial) or coordinate[axis] == 0:
            continue
        if fill is None and stage.before[axis] == placement:
            continue  # the terms of a sum that goes on being owed
        fill = NEUTRAL.get(placement.reduce_op, fill)
    return fill


_BUILDERS: dict[Kind, Callable[[Stage, Frame], Iterator[Step]]] = {
    "narrow": _narrow,
    "scatter": _scatter,
    "reduce": _reduce,
    "move": _move,
    "pad": _pad,
    "mask": _mask,
}
