"""Plans of redistributions: the steps that bring a tensor from one layout to another.

Planning is pure: it reads placements, sizes and the shape, never data, and communicates with no
rank. Everything it decides follows from facts that are equal on every rank, so that all ranks run
the same collectives, including those that own nothing. `stages` and `search` choose the path
without looking at the shape; here it becomes the steps of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_shape
from vescale_dtensor._layout.mesh import axis_names, describe
from vescale_dtensor._layout.shard_geometry import check_fits
from vescale_dtensor._redistribute.cross_mesh import RankMap, plan_cross_mesh, rank_map
from vescale_dtensor._redistribute.lower import plan_steps
from vescale_dtensor._redistribute.ownership import PlanContext
from vescale_dtensor._redistribute.steps import Mask, Rearrange, Slice, Step


@dataclass(frozen=True, slots=True)
class RedistributionPlan:
    """What this rank does to bring its local tensor from `source` to `target`.

    `str` of it is a table: what is done, over which axes, the local shape afterwards, bytes sent.

    Attributes:
        source, target: the layouts.
        mesh: the mesh over which the steps communicate.
        shape: global shape.
        steps: in the order in which they run.
        ends_in_view: whether the result is a part of what some tensor held before, not yet copied.
    """

    source: Layout
    target: Layout
    mesh: DeviceMesh
    shape: Shape
    steps: tuple[Step, ...]
    ends_in_view: bool

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


@lru_cache(maxsize=4096)
def plan_redistribution(
    source: Layout, target: Layout, shape: Shape, itemsize: int = 4
) -> RedistributionPlan:
    """The plan from `source` to `target` for a tensor of global `shape`.

    Memory orders are ignored. The plan has no steps if no rank has anything to do.

    Raises:
        MeshError: the layouts are on meshes of different ranks.
        LayoutError: a cut that does not fit the shape.
    """
    ranks = _rank_map(source, target)
    for layout in (source, target):
        check_fits(layout.placements, layout.sizes, shape)
    frame = PlanContext(source.sizes, shape, source.coordinate, itemsize)
    mesh = source.mesh
    if ranks is None:
        steps = plan_steps(source.placements, target.placements, frame)
    else:
        passage = plan_cross_mesh(source.placements, target.placements, frame, target.sizes, ranks)
        steps = passage.steps
        mesh = target.mesh if passage.on_target else mesh
    return RedistributionPlan(source, target, mesh, shape, steps, _ends_in_view(steps))


def _rank_map(source: Layout, target: Layout) -> RankMap | None:
    """Where ranks go from mesh to mesh; None if they stay, whatever the axes are called."""
    if source.mesh is target.mesh or source.mesh == target.mesh:
        return None
    ranks = rank_map(source.mesh, target.mesh)
    stay = source.sizes == target.sizes and all(a == b for a, b in ranks.items())
    return None if stay else ranks


def _ends_in_view(steps: tuple[Step, ...]) -> bool:
    touching = [step for step in steps if not (isinstance(step, Mask) and step.fill is None)]
    if not touching:
        return True
    last = touching[-1]
    return isinstance(last, Slice) or (isinstance(last, Rearrange) and last.relabels)
