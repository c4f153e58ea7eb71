"""Redistribution plans: the steps by which a rank converts its local tensor to another layout.

Planning is pure: it reads placements, mesh sizes and the global shape, never data, and does not
communicate. All its decisions follow from facts that are equal on every rank, so every rank runs
the same collectives in the same order, also a rank whose shard is empty. `search` chooses the
stages without looking at the shape; `lower` turns them into the steps of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.mesh import axis_names, describe
from vescale_dtensor._layout.shard_geometry import check_fits
from vescale_dtensor._layout.spellings import respelled
from vescale_dtensor._redistribute.cross_mesh import RankMap, plan_cross_mesh, rank_map
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.ownership import PlanContext
from vescale_dtensor._redistribute.steps import (
    AllReduce,
    Mask,
    PackedReduceScatter,
    Rearrange,
    ReduceScatter,
    Slice,
    Step,
)
from vescale_dtensor._torch.worlds import cached


@dataclass(frozen=True, slots=True)
class RedistributionPlan:
    """The steps that convert this rank's local tensor from `source` to `target`.

    `str` of a plan is a table: each step, the mesh axes it communicates over, the local shape after
    it, and the bytes that this rank sends.

    Attributes:
        source, target: the two layouts.
        mesh: the mesh whose groups the steps communicate over.
        shape: global shape.
        steps: in the order in which they run.
        ends_in_view: whether the result of the last step is a view of an earlier tensor, which the
            executor has to copy.
        rounding_steps: from the first reduction to the last; None if there is one at most.
    """

    source: Layout
    target: Layout
    mesh: DeviceMesh
    shape: Shape
    steps: tuple[Step, ...]
    ends_in_view: bool
    rounding_steps: range | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends, as `vescale_comm.trace` counts them.

        Dtypes that are reduced as another one (int16 as int32; halves between two reductions, and
        few halves in an all-reduce, as float32) weigh more there.
        """
        return sum(step.wire_bytes for step in self.steps)

    @property
    def collectives(self) -> int:
        """Number of collectives, the same on every rank; ordered ones of halves count once."""
        # A step communicates exactly if it names axes, and local steps may be left out on some
        # ranks, so only steps with axes may be counted here.
        return sum(bool(step.axes) for step in self.steps)

    def __str__(self) -> str:
        names = axis_names(self.mesh)
        # The target's mesh is named only where it differs: nearly every plan stays on one mesh.
        there = self.target.mesh
        to = "" if there == self.source.mesh else f" on {describe(there)}"
        head = (
            f"{list(self.shape)} on {describe(self.source.mesh)}: {list(self.source.placements)}"
            f" -> {list(self.target.placements)}{to}"
        )
        candidates = [("local", "", local_shape(self.source, self.shape), "")]
        for step in self.steps:
            over = ", ".join(names[axis] for axis in step.axes)
            candidates.append(
                (step.title, over, step.shape, f"{step.wire_bytes:,} B" if over else "")
            )
        lines = [
            f"  {what:<28}{over:<12}{list(at)!s:<20}{sent:>14}"
            for what, over, at, sent in candidates
        ]
        return "\n".join([head, *(line.rstrip() for line in lines)])


# Layouts compare by the identity of their mesh and hold this rank's coordinate, so a cached plan is
# never used for another rank or for process groups that were destroyed meanwhile.
@cached(4096)
def plan_redistribution(
    source: Layout, target: Layout, shape: Shape, itemsize: int = 4
) -> RedistributionPlan:
    """Plan the redistribution from `source` to `target` of a tensor of global `shape`.

    The memory orders of the layouts are ignored. The plan has no steps if no rank has to do
    anything.

    Args:
        source: layout of the tensor.
        target: layout of the result.
        shape: global shape.
        itemsize: bytes of an element; it scales `wire_bytes` and decides nothing.

    Raises:
        MeshError: the layouts are on meshes of different ranks.
        LayoutError: a shard that does not fit the shape.
    """
    ranks = _rank_map(source, target)
    # Both ends are checked for all coordinates before anything is planned, so every rank raises the
    # same error, or none does.
    for layout in (source, target):
        check_fits(layout.placements, layout.sizes, shape)
    # A plan speaks of coordinates on the source mesh; `plan_cross_mesh` maps them to the target's.
    frame = PlanContext(source.sizes, shape, source.coordinate, itemsize)
    mesh = source.mesh
    if ranks is None:
        steps = plan_steps(source.placements, target.placements, frame)
    # Of two spellings of one mesh, on the one that both layouts have words on.
    elif (here := respelled(target, mesh)) is not None:
        steps = plan_steps(source.placements, here.placements, frame)
    elif (there := respelled(source, target.mesh)) is not None:
        frame, mesh = PlanContext(target.sizes, shape, target.coordinate, itemsize), target.mesh
        steps = plan_steps(there.placements, target.placements, frame)
    else:
        passage = plan_cross_mesh(source.placements, target.placements, frame, target.sizes, ranks)
        steps = passage.steps
        mesh = target.mesh if passage.on_target else mesh
    view, rounding = _ends_in_view(steps), _rounding_steps(steps)
    return RedistributionPlan(source, target, mesh, shape, steps, view, rounding)


def _rank_map(source: Layout, target: Layout) -> RankMap | None:
    """Return each rank's coordinate on the target mesh, by that on the source mesh.

    Returns:
        None where all ranks keep their coordinates: then all of the plan is on the source mesh,
        whatever the axes of the target are called.
    """
    if source.mesh is target.mesh or source.mesh == target.mesh:
        return None
    ranks = rank_map(source.mesh, target.mesh)
    # Meshes that differ in names alone need no cross-mesh plan: groups are found by axis index.
    stay = source.sizes == target.sizes and all(a == b for a, b in ranks.items())
    return None if stay else ranks


def _rounding_steps(steps: tuple[Step, ...]) -> range | None:
    """From the first step that reduces to the last, if there are several."""
    found = [
        index
        for index, step in enumerate(steps)
        if isinstance(step, AllReduce | ReduceScatter | PackedReduceScatter)
    ]
    return range(found[0], found[-1] + 1) if len(found) > 1 else None


def _ends_in_view(steps: tuple[Step, ...]) -> bool:
    """Whether the last step that changes anything returns a view."""
    # A mask that keeps the values returns its input itself, so what counts is the step before it.
    touching = [step for step in steps if not (isinstance(step, Mask) and step.fill is None)]
    # Nothing but such masks (or nothing at all): the result would be the caller's own tensor.
    if not touching:
        return True
    last = touching[-1]
    return isinstance(last, Slice) or (isinstance(last, Rearrange) and last.relabels)
