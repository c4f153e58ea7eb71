"""Plans between meshes: the same ranks, arranged in another shape or order.

On the mesh that a tensor comes from, sums are completed (scattered, where the target is cut); then
every rank fetches what it lacks by one all-to-all over all ranks; on the mesh that it goes to, only
local steps remain. Nothing is sent where every rank already holds what it is to hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._layout.mesh import Coordinate, coordinates, describe
from vescale_dtensor._layout.placements import Partial, Replicate, Shard, Sharded
from vescale_dtensor._layout.shard_geometry import cells
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.lower_packed import put, taken
from vescale_dtensor._redistribute.ownership import Frame, Grid, between
from vescale_dtensor._redistribute.regions import Pair, count
from vescale_dtensor._redistribute.states import Axes, Placements, effective, in_mesh_order
from vescale_dtensor._redistribute.steps import PackedAllToAll, Rearrange, Step

Places = dict[Coordinate, Coordinate]
"""For every coordinate of one mesh, that of the same rank in the other."""


def places_between(source: DeviceMesh, target: DeviceMesh) -> Places:
    """Where the ranks of one mesh are in another.

    Raises:
        MeshError: the meshes have different ranks or devices.
    """
    ranks, others = (mesh.mesh.flatten().tolist() for mesh in (source, target))
    if set(ranks) != set(others) or source.device_type != target.device_type:
        raise MeshError(
            f"redistribution from {_spelled(source)} to {_spelled(target)}: tensors move between "
            "meshes of the same ranks and devices only"
        )
    at = dict(zip(others, coordinates(tuple(target.shape)), strict=True))
    return {
        coordinate: at[rank]
        for rank, coordinate in zip(ranks, coordinates(tuple(source.shape)), strict=True)
    }


def _spelled(mesh: DeviceMesh) -> str:
    return f"{describe(mesh)} of {mesh.device_type} ranks {mesh.mesh.flatten().tolist()}"


class Crossing(NamedTuple):
    """What is held on both meshes, once nothing is partial.

    Attributes:
        old, new: the grids of the mesh that is left, and of the other one.
        places: see `Places`.
        cutters: axes of the left mesh that cut; ranks that differ in no other axis hold one copy.
    """

    old: Grid
    new: Grid
    places: Places
    cutters: Axes

    def pairs(self, sender: Coordinate, receiver: Coordinate) -> list[Pair]:
        """What one rank sends to another; both are given on the mesh that is left.

        Everybody fetches from the copy to which it belongs itself, so all copies send alike.
        """
        if any(
            a != b
            for axis, (a, b) in enumerate(zip(sender, receiver, strict=True))
            if axis not in self.cutters
        ):
            return []
        return between(self.old, sender, self.new, self.places[receiver])

    def moves(self) -> bool:
        """Whether any rank lacks anything."""
        return any(
            sum(part.numel for part, _ in self.pairs(rank, rank)) != prod(self.new.local_shape(at))
            for rank, at in self.places.items()
        )

    def relabels(self) -> bool:
        """Whether every rank holds the same on both meshes, lying alike."""
        return self.old.groups == self.new.groups and all(
            cells(self.old.held(dims, rank)) == cells(self.new.held(dims, at))
            for rank, at in self.places.items()
            for dims in self.old.groups
        )


class Passage(NamedTuple):
    """The steps from mesh to mesh, and whether it is on the target mesh that they communicate."""

    steps: tuple[Step, ...]
    on_target: bool = False


def plan_passage(
    source: Placements, target: Placements, frame: Frame, sizes: tuple[int, ...], places: Places
) -> Passage:
    """The steps of the rank of `frame`, from its mesh to one of `sizes`."""
    arrived = Frame(sizes, frame.shape, places[frame.coordinate], frame.itemsize)
    # A reduction over all ranks is the same on both meshes, so all the rest can be done on one.
    owed = _over_all(effective(target, sizes))
    if owed is not None:
        return Passage(plan_steps(source, (owed,) * len(source), frame))
    owed = _over_all(effective(source, frame.sizes))
    if owed is not None:
        return Passage(plan_steps((owed,) * len(target), target, arrived), on_target=True)
    summed = _completed(source, target)
    kept: Placements = tuple(Replicate() if isinstance(p, Partial) else p for p in target)
    crossing = Crossing(
        Grid(in_mesh_order(effective(summed, frame.sizes)), frame),
        Grid(in_mesh_order(effective(kept, sizes)), arrived),
        places,
        tuple(a for a, p in enumerate(effective(summed, frame.sizes)) if p.is_shard()),
    )
    before, after = plan_steps(source, summed, frame), plan_steps(kept, target, arrived)
    return Passage((*before, *_crossed(crossing, frame), *after))


def _over_all(placements: Placements) -> Partial | None:
    """The one reduction over all ranks that a tensor owes, if that is all there is."""
    kinds = set(placements)
    kind = kinds.pop()
    return kind if isinstance(kind, Partial) and not kinds else None


def _completed(source: Placements, target: Placements) -> Placements:
    """The source without partial axes: cut along a dim that the target cuts, if that is free."""
    cut = {dim for p in source if isinstance(p, Sharded) for dim in p.cut_dims()}
    wanted = [dim for p in target if isinstance(p, Sharded) for dim in p.cut_dims()]
    free = [dim for dim in wanted if dim not in cut]
    whole = Shard(free[0]) if free else Replicate()
    return tuple(whole if isinstance(p, Partial) else p for p in source)


def _crossed(crossing: Crossing, frame: Frame) -> Iterable[Step]:
    at = frame.coordinate
    shape = crossing.new.local_shape(crossing.places[at])
    # All ranks ask about all ranks, so that they agree on what is to be done.
    if not crossing.moves():
        own = crossing.pairs(at, at)
        return (
            () if crossing.relabels() else (Rearrange(shape=shape, take=taken(own), put=put(own)),)
        )
    send = {member: taken(crossing.pairs(at, member)) for member in crossing.places}
    receive = [put(crossing.pairs(member, at)) for member in crossing.places]
    sent = sum(count(part) for member, part in send.items() if member != at)
    return (
        PackedAllToAll(
            shape=shape,
            axes=tuple(range(len(frame.sizes))),
            wire_bytes=sent * frame.itemsize,
            send=tuple(send.values()),
            receive=tuple(receive),
        ),
    )
