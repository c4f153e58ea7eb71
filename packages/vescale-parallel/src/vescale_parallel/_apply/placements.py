"""Converts layouts by axis name to the placements of a tensor on a mesh."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from vescale_dtensor import InterleavedShard, Replicate, Shard

from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._notation.layout import RuleLayout


def placements(
    layout: RuleLayout, mesh: DeviceMesh, ndim: int, unnamed: Sequence[Any] | None = None
) -> tuple[Any, ...]:
    """Return one placement per mesh axis.

    Args:
        layout: what is asked; axes that the mesh does not have are left out.
        mesh: the named mesh.
        ndim: dims of the tensor; must be at least `layout.least_ndim`.
        unnamed: placements to keep on axes that the layout does not name; None replicates there.
    """
    chosen: list[Any] = []
    for position, axis in enumerate(mesh_sizes(mesh)):
        dim = layout.dim_of(axis, ndim)
        if dim is not None:
            blocks = layout.blocks_of(axis)
            chosen.append(InterleavedShard(dim, blocks) if len(blocks) > 1 else Shard(dim))
        # "replicate" and "full" are explicit; an axis that is not named keeps what it has.
        elif unnamed is None or layout.covers(axis):
            chosen.append(Replicate())
        else:
            chosen.append(unnamed[position])
    return tuple(chosen)
