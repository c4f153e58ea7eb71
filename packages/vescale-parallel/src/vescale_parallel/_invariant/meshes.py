"""The mesh on which one logical shard is computed: that of the plan without the batch's axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from vescale_parallel._common.mesh import mesh_sizes
from vescale_parallel._common.mesh_axes import with_axes

ALONE = "shard"
"""The axis of a mesh of one rank, where no other axis is left."""


def compute_mesh(mesh: DeviceMesh, batch: Sequence[str]) -> DeviceMesh:
    """Return the mesh without some axes: of one rank if none is left. Collective.

    Args:
        mesh: all ranks.
        batch: axes that share the batch.
    """
    names = list(mesh_sizes(mesh))
    left = tuple(name for name in names if name not in batch)
    if len(left) == len(names):
        return mesh
    if left:
        return mesh[left]
    name = ALONE
    while name in names:
        name += "_"
    return with_axes(mesh, {**{one: (one,) for one in names}, name: ()})[name]
