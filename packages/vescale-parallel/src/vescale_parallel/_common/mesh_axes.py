"""The ranks of a mesh along other axes, without asking ranks outside of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import group_alone, group_of

from vescale_parallel._common.mesh import mesh_sizes


def with_axes(mesh: DeviceMesh, axes: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
    """Return a mesh of the same ranks with other axes. Collective of its ranks.

    Args:
        mesh: the ranks, by axes with names.
        axes: by the name of each new axis, outermost first, those of `mesh` that it flattens, the
            first of them outermost; none for an axis of one rank. Each axis of `mesh` once.
    """
    sizes = mesh_sizes(mesh)
    flat = [one for some in axes.values() for one in some]
    order = [list(sizes).index(one) for one in flat]
    permuted = mesh.mesh.permute(order).contiguous()
    ranks = permuted.reshape([math.prod(sizes[one] for one in some) for some in axes.values()])
    names = tuple(axes)
    if ranks.numel() == dist.get_world_size():
        return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    # torch makes groups of a mesh by all processes of the world, which all pass the same ranks.
    # Where several meshes stand side by side they do not, and groups of both would have one name:
    # ranks of one would receive what those of the other send.
    single = DeviceMesh.from_group(
        [mesh.get_group(one) for one in flat],
        mesh.device_type,
        mesh=permuted,
        mesh_dim_names=tuple(flat),
    )
    groups = [
        (group_of(single, some) if some else group_alone(mesh.device_type)).process_group
        for some in axes.values()
    ]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)
