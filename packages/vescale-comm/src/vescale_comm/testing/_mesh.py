"""Device meshes that outlive a case."""

import weakref
from functools import lru_cache

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_comm._groups.group import default_process_group


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a CPU mesh over all ranks of this worker's world, made once and then used again.

    Making the process groups of a mesh is most of what a small case costs. This one comes from a
    cache of the worker, which the pool empties when it makes the worker's world anew; so it is
    always safe to use, where a mesh that a test file keeps would not be.

    Args:
        shape: extent of each axis; their product is the world size.
        names: name of each axis.
    """
    world = weakref.ref(default_process_group())
    return _made(world, tuple(shape), None if names is None else tuple(names))


def forget_meshes() -> None:
    """Empty the cache: the process groups of its meshes are about to go."""
    _made.cache_clear()


# Every rank runs the same cases in the same order, so all keep and drop the same meshes. The world
# is part of the key, because those of a simulation are in one process.
@lru_cache(maxsize=32)
def _made(
    world: "weakref.ref[ProcessGroup]", shape: tuple[int, ...], names: tuple[str, ...] | None
) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
