"""`init_device_mesh`, for which ranks compare what they ask for before they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as make_mesh
from vescale_comm import execution_log, init_process_group


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    **options: Any,
) -> DeviceMesh:
    """Make a mesh over all processes: `torch.distributed.device_mesh.init_device_mesh`. Collective.

    As there, the default process group is made where there is none, from torchrun's environment.

    Args:
        device_type: `"cpu"` or `"cuda"`.
        mesh_shape: extents of the axes; their product is the number of processes.
        mesh_dim_names: names of the axes.
        options: further ones of torch's, which refuses those that it does not know.

    Raises:
        CommMismatchError: ranks ask for other meshes. On every rank, before a group of an axis is
            made, where torch's own function waits for its timeout.
    """
    if not dist.is_initialized():
        # First, although torch checks the arguments before: whoever raises must have joined the
        # others, or they wait for it.
        init_process_group()
    log = execution_log(range(dist.get_world_size()))
    if log is not None:
        shape = tuple(mesh_shape)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        asked = (device_type, shape, names, *_backends(options))
        log.record(("makes a mesh", *asked), together=True)
    return make_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **options)


def _backends(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the backends that axes are to have, without what only one process can compare."""
    asked = options.get("backend_override") or {}
    named = [(axis, b[0] if isinstance(b, tuple) else b) for axis, b in asked.items()]
    return tuple(f"{axis}: {b if isinstance(b, str) else type(b).__name__}" for axis, b in named)
