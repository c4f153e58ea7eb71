"""`init_device_mesh`, for which ranks compare what they ask for before they wait for each other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as make_mesh
from vescale_comm import execution_log


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    **options: Any,
) -> DeviceMesh:
    """Make a mesh over all processes: `torch.distributed.device_mesh.init_device_mesh`. Collective.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        mesh_shape: extents of the axes; their product is the number of processes.
        mesh_dim_names: names of the axes.
        options: further ones of torch's, which refuses those that it does not know.

    Raises:
        CommMismatchError: ranks of a process group that exists ask for other meshes. On every rank,
            where torch's own function waits for its timeout.
    """
    if dist.is_initialized():
        log = execution_log(range(dist.get_world_size()))
        if log is not None:
            names = None if mesh_dim_names is None else tuple(mesh_dim_names)
            log.record(("makes a mesh", device_type, tuple(mesh_shape), names), together=True)
    return make_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **options)
