"""Reads names, sizes and coordinates of torch's DeviceMesh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._errors import MeshError
from vescale_dtensor._torch.compat import entered_mesh, keeps_rank_order
from vescale_dtensor._torch.worlds import cached

Coordinate = tuple[int, ...]


@cached(64)
def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the mesh axes; an unnamed axis is called by its index."""
    return mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))


def own_coordinate(mesh: DeviceMesh) -> Coordinate:
    """Return this rank's coordinate.

    Raises:
        MeshError: this rank is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    # A mesh may be made of some ranks only, and torch makes the object on the others, too.
    if coordinate is None:
        raise MeshError(f"this rank is not part of {mesh}; only its members may use its tensors")
    return tuple(coordinate)


@cached(64)
def is_ascending(mesh: DeviceMesh, axis: int) -> bool:
    """Whether all groups along an axis have the mesh's order of ranks: torch sorts those it makes.

    The same on every rank, also on one whose own group is sorted.
    """
    lines = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.shape[axis]).tolist()
    return keeps_rank_order(mesh) or all(line == sorted(line) for line in lines)


def coordinates(sizes: tuple[int, ...]) -> Iterator[Coordinate]:
    """Return all coordinates of a mesh of these sizes, row-major."""
    return product(*(range(n) for n in sizes))


def describe(mesh: DeviceMesh) -> str:
    """Return the short form for messages: `mesh(dp=2, tp=2)`."""
    named = zip(axis_names(mesh), tuple(mesh.shape), strict=True)
    return f"mesh({', '.join(f'{name}={size}' for name, size in named)})"


def current_mesh(what: str) -> DeviceMesh:
    """Return the mesh of the enclosing `with mesh:`; `what` names the caller in the message.

    Raises:
        MeshError: there is none.
    """
    mesh: DeviceMesh | None = entered_mesh()
    # Not the default mesh of all ranks: one that the caller did not name would be a guess.
    if mesh is None:
        raise MeshError(f"{what}: no device_mesh was given, and no `with mesh:` is open; pass one")
    return mesh
