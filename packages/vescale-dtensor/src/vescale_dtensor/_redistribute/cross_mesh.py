"""Plans between meshes that arrange the same ranks in another shape or order.

On the source mesh partial values are reduced (scattered where the target is sharded). Then every
rank fetches what it lacks in one all-to-all over all ranks. On the target mesh only local steps
remain. Nothing is sent where every rank already holds what it will own.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._layout.mesh import Coordinate, coordinates, describe
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Partial, Replicate, Shard
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
    """Map each coordinate of one mesh to the coordinate of the same rank in another.

    Raises:
        MeshError: the meshes have different ranks or devices.
    """
    ranks, others = (mesh.mesh.flatten().tolist() for mesh in (source, target))
    if set(ranks) != set(others) or source.device_type != target.device_type:
        raise MeshError(
            f"redistribution from {_spelled(source)} to {_spelled(target)}: tensors move between "
            "meshes of the same ranks and devices only"
        )
    # Both meshes list their ranks row-major, and so do `coordinates`.
    at = dict(zip(others, coordinates(tuple(target.shape)), strict=True))
    return {
        coordinate: at[rank]
        for rank, coordinate in zip(ranks, coordinates(tuple(source.shape)), strict=True)
    }


def _spelled(mesh: DeviceMesh) -> str:
    """Describe a mesh with its device type and ranks, for a message."""
    return f"{describe(mesh)} of {mesh.device_type} ranks {mesh.mesh.flatten().tolist()}"


class MeshTransfer(NamedTuple):
    """What ranks own on both meshes, once nothing is partial.

    Attributes:
        old, new: ownership on the source mesh and on the target mesh.
        rank_map: see `RankMap`.
        sharding_axes: axes of the source mesh that shard; ranks that differ in no other axis hold
            one copy between them.
    """

    old: OwnershipMap
    new: OwnershipMap
    rank_map: RankMap
    sharding_axes: Axes

    def pairs(self, sender: Coordinate, receiver: Coordinate) -> list[Pair]:
        """Return what one rank sends to another; both are coordinates on the source mesh.

        A receiver fetches only from the copy to which it belongs itself. So no element arrives
        twice, and all copies send equally much.
        """
        if any(
            a != b
            for axis, (a, b) in enumerate(zip(sender, receiver, strict=True))
            if axis not in self.sharding_axes
        ):
            return []
        return shared_elements(self.old, sender, self.new, self.rank_map[receiver])

    def communicates(self) -> bool:
        """Whether any rank lacks anything; asked for all ranks, so that all agree."""
        return any(
            sum(part.numel for part, _ in self.pairs(rank, rank)) != prod(self.new.local_shape(at))
            for rank, at in self.rank_map.items()
        )

    def relabels(self) -> bool:
        """Whether every rank owns the same on both meshes, in the same local order."""
        return self.old.groups == self.new.groups and all(
            strided_boxes(self.old.owned(dims, rank)) == strided_boxes(self.new.owned(dims, at))
            for rank, at in self.rank_map.items()
            for dims in self.old.groups
        )


class CrossMeshPlan(NamedTuple):
    """The steps from mesh to mesh.

    Attributes:
        steps: the steps.
        on_target: whether their groups are those of the target mesh; a plan communicates on one
            mesh.
    """

    steps: tuple[Step, ...]
    on_target: bool = False


def plan_cross_mesh(
    source: Placements,
    target: Placements,
    frame: PlanContext,
    sizes: tuple[int, ...],
    rank_map: RankMap,
) -> CrossMeshPlan:
    """Plan the steps of the rank of `frame` from its mesh to one of `sizes`.

    Args:
        source: placements on the source mesh.
        target: placements on the target mesh.
        frame: context of the source mesh.
        sizes: extent of each axis of the target mesh.
        rank_map: see `RankMap`.
    """
    arrived = PlanContext(sizes, frame.shape, rank_map[frame.coordinate], frame.itemsize)
    # A reduction over all ranks means the same on both meshes. So where one end is nothing else,
    # all of the redistribution can be planned on the mesh of the other end.
    reduction = _only_reduction(without_trivial_axes(target, sizes))
    if reduction is not None:
        return CrossMeshPlan(plan_steps(source, (reduction,) * len(source), frame))
    reduction = _only_reduction(without_trivial_axes(source, frame.sizes))
    if reduction is not None:
        return CrossMeshPlan(
            plan_steps((reduction,) * len(target), target, arrived), on_target=True
        )
    summed = _without_partials(source, target)
    # Partial axes of the target are replicated during the transfer and masked afterwards: local
    # steps.
    kept: Placements = tuple(Replicate() if isinstance(p, Partial) else p for p in target)
    transfer = MeshTransfer(
        OwnershipMap(in_mesh_order(without_trivial_axes(summed, frame.sizes)), frame),
        OwnershipMap(in_mesh_order(without_trivial_axes(kept, sizes)), arrived),
        rank_map,
        tuple(a for a, p in enumerate(without_trivial_axes(summed, frame.sizes)) if p.is_sharded()),
    )
    # All that communicates comes first, on the source mesh; `after` only pads, scales and masks.
    before, after = plan_steps(source, summed, frame), plan_steps(kept, target, arrived)
    return CrossMeshPlan((*before, *_transfer_steps(transfer, frame), *after))


def _only_reduction(placements: Placements) -> Partial | None:
    """Return the one reduction over all axes, if the tensor is partial on all of them alike."""
    kinds = set(placements)
    kind = kinds.pop()
    return kind if isinstance(kind, Partial) and not kinds else None


def _without_partials(source: Placements, target: Placements) -> Placements:
    """Replace the partial axes of the source: by a shard of a dim that the target shards, if free.

    A reduce-scatter sends half of what an all-reduce does, and the transfer exchanges shards
    anyway.
    """
    sharded = {dim for p in source if isinstance(p, Sharded) for dim in p.cut_dims()}
    wanted = [dim for p in target if isinstance(p, Sharded) for dim in p.cut_dims()]
    free = [dim for dim in wanted if dim not in sharded]
    scattered = Shard(free[0]) if free else Replicate()
    return tuple(scattered if isinstance(p, Partial) else p for p in source)


def _transfer_steps(transfer: MeshTransfer, frame: PlanContext) -> Iterable[Step]:
    """Return the steps between the meshes: none, a local copy, or one exchange."""
    at = frame.coordinate
    shape = transfer.new.local_shape(transfer.rank_map[at])
    # Every rank asks this about all ranks, so all of them take the same branch.
    if not transfer.communicates():
        own = transfer.pairs(at, at)
        return (
            ()
            if transfer.relabels()
            else (Rearrange(shape=shape, source=source_regions(own), target=target_regions(own)),)
        )
    # Listed in the order of `rank_map`, which is row-major over the source mesh: the order of the
    # group over all its axes.
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
