"""Plans between meshes that arrange the same ranks in another shape or order.

On the source mesh partial sums are reduced (scattered where the target is sharded). Then every rank
fetches what it lacks by one all-to-all over all ranks; on the target mesh only local steps remain.
Nothing is sent where every rank already holds what it is to hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._layout.mesh import Coordinate, coordinates, describe
from vescale_dtensor._layout.placements import Partial, Replicate, Shard, Sharded
from vescale_dtensor._layout.shard_geometry import strided_boxes
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.lower_packed import source_regions, target_regions
from vescale_dtensor._redistribute.ownership import OwnershipMap, PlanContext, shared_elements
from vescale_dtensor._redistribute.regions import Pair, count
from vescale_dtensor._redistribute.states import (
    Axes,
    Placements,
    in_mesh_order,
    without_trivial_axes,
)
from vescale_dtensor._redistribute.steps import PackedAllToAll, Rearrange, Step

RankMap = dict[Coordinate, Coordinate]
"""For every coordinate of one mesh, that of the same rank in the other."""


def rank_map(source: DeviceMesh, target: DeviceMesh) -> RankMap:
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


class MeshTransfer(NamedTuple):
    """What is held on both meshes, once nothing is partial.

    Attributes:
        old, new: the grids of the mesh that is left, and of the other one.
        rank_map: see `RankMap`.
        sharding_axes: axes of the left mesh that shard; ranks that differ in no other axis hold one
            copy.
    """

    old: OwnershipMap
    new: OwnershipMap
    rank_map: RankMap
    sharding_axes: Axes

    def pairs(self, sender: Coordinate, receiver: Coordinate) -> list[Pair]:
        """What one rank sends to another; both are given on the mesh that is left.

        Everybody fetches from the copy to which it belongs itself, so all copies send alike.
        """
        if any(
            a != b
            for axis, (a, b) in enumerate(zip(sender, receiver, strict=True))
            if axis not in self.sharding_axes
        ):
            return []
        return shared_elements(self.old, sender, self.new, self.rank_map[receiver])

    def communicates(self) -> bool:
        """Whether any rank lacks anything."""
        return any(
            sum(part.numel for part, _ in self.pairs(rank, rank)) != prod(self.new.local_shape(at))
            for rank, at in self.rank_map.items()
        )

    def relabels(self) -> bool:
        """Whether every rank holds the same on both meshes, lying alike."""
        return self.old.groups == self.new.groups and all(
            strided_boxes(self.old.owned(dims, rank)) == strided_boxes(self.new.owned(dims, at))
            for rank, at in self.rank_map.items()
            for dims in self.old.groups
        )


class CrossMeshPlan(NamedTuple):
    """The steps from mesh to mesh, and whether it is on the target mesh that they communicate."""

    steps: tuple[Step, ...]
    on_target: bool = False


def plan_cross_mesh(
    source: Placements,
    target: Placements,
    frame: PlanContext,
    sizes: tuple[int, ...],
    rank_map: RankMap,
) -> CrossMeshPlan:
    """The steps of the rank of `frame`, from its mesh to one of `sizes`."""
    arrived = PlanContext(sizes, frame.shape, rank_map[frame.coordinate], frame.itemsize)
    # A reduction over all ranks is the same on both meshes, so all the rest can be done on one.
    reduction = _only_reduction(without_trivial_axes(target, sizes))
    if reduction is not None:
        return CrossMeshPlan(plan_steps(source, (reduction,) * len(source), frame))
    reduction = _only_reduction(without_trivial_axes(source, frame.sizes))
    if reduction is not None:
        return CrossMeshPlan(
            plan_steps((reduction,) * len(target), target, arrived), on_target=True
        )
    summed = _without_partials(source, target)
    kept: Placements = tuple(Replicate() if isinstance(p, Partial) else p for p in target)
    transfer = MeshTransfer(
        OwnershipMap(in_mesh_order(without_trivial_axes(summed, frame.sizes)), frame),
        OwnershipMap(in_mesh_order(without_trivial_axes(kept, sizes)), arrived),
        rank_map,
        tuple(a for a, p in enumerate(without_trivial_axes(summed, frame.sizes)) if p.is_sharded()),
    )
    before, after = plan_steps(source, summed, frame), plan_steps(kept, target, arrived)
    return CrossMeshPlan((*before, *_transfer_steps(transfer, frame), *after))


def _only_reduction(placements: Placements) -> Partial | None:
    """The one reduction over all ranks that a tensor owes, if that is all there is."""
    kinds = set(placements)
    kind = kinds.pop()
    return kind if isinstance(kind, Partial) and not kinds else None


def _without_partials(source: Placements, target: Placements) -> Placements:
    """The source without partial axes: cut along a dim that the target cuts, if that is free."""
    sharded = {dim for p in source if isinstance(p, Sharded) for dim in p.cut_dims()}
    wanted = [dim for p in target if isinstance(p, Sharded) for dim in p.cut_dims()]
    free = [dim for dim in wanted if dim not in sharded]
    whole = Shard(free[0]) if free else Replicate()
    return tuple(whole if isinstance(p, Partial) else p for p in source)


def _transfer_steps(transfer: MeshTransfer, frame: PlanContext) -> Iterable[Step]:
    at = frame.coordinate
    shape = transfer.new.local_shape(transfer.rank_map[at])
    # All ranks ask about all ranks, so that they agree on what is to be done.
    if not transfer.communicates():
        own = transfer.pairs(at, at)
        return (
            ()
            if transfer.relabels()
            else (Rearrange(shape=shape, source=source_regions(own), target=target_regions(own)),)
        )
    send = {member: source_regions(transfer.pairs(at, member)) for member in transfer.rank_map}
    receive = [target_regions(transfer.pairs(member, at)) for member in transfer.rank_map]
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
