"""Groups by mesh axes: one axis, or several flattened into one group."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.connection import connect
from vescale_comm._groups.group import (
    Group,
    default_process_group,
    group_with_axes,
    ranks_of,
)
from vescale_comm._groups.new_group import lane_of, process_group_of
from vescale_comm._torch.compat import no_torch_function
from vescale_comm._torch.ranks import compact
from vescale_comm._torch.weak_by_id import WeakById

Axis = str | int

# By the axes as they were given, and by their indices.
_of_mesh: WeakById[DeviceMesh, dict[Axis | tuple[Axis, ...], Group]] = WeakById()


# By the group whose ranks they have as well, and by number: see `lane` of `group_of`.
_lanes: WeakById[Group, dict[int, Group]] = WeakById()


def group_of(mesh: DeviceMesh, axes: Axis | Sequence[Axis], *, lane: int = 0) -> Group:
    """Return the group of ranks that differ from this one only along the given mesh axes.

    Several axes give one flattened group: its members are in row-major order over those axes, in
    the mesh's order whatever the order they are named in. It is made at first use, by its members
    only, and kept for the mesh's lifetime; so every member has to ask for it at the same point of
    the program, as for any collective.

    Args:
        mesh: a `torch.distributed.DeviceMesh` that contains this rank.
        axes: one axis or several, each by name or by index (negative counts from the end).
        lane: another number is another group of the same ranks: what goes by it need not wait for
            what goes by the others, as for messages of both directions.

    Raises:
        CommArgumentError: an axis that the mesh does not have, none at all, one named twice, or a
            mesh that this rank is not in.

    Examples:
        group_of(mesh, "tp")            # this rank's row of tp
        group_of(mesh, ("dp", "cp"))    # one group over both
    """
    if lane:
        return _lane(group_of(mesh, axes), lane, mesh.device_type)
    key = axes if isinstance(axes, str | int) else tuple(axes)
    # The common case first: a dict by identity, then one by axes as they were written.
    groups = _of_mesh.get(mesh)
    if groups is not None and key in groups:
        return groups[key]
    if not isinstance(mesh, DeviceMesh):
        raise CommArgumentError(f"group_of takes a DeviceMesh, not {type(mesh).__name__}")
    dims = _dims(mesh, (key,) if isinstance(key, str | int) else key)
    # No lock: members make groups in program order, so a second thread would be an error already.
    groups = _of_mesh.setdefault(mesh, {})
    if dims not in groups:
        # Looking at the mesh, and making a group, are no part of a program that a mode records.
        with no_torch_function():
            groups[dims] = _find(mesh, dims)
    groups[key] = groups[dims]
    return groups[key]


def group_alone(device_type: str = "cpu") -> Group:
    """Return the group of this rank alone, as for an axis of one rank that a mesh is to get.

    No other rank is asked, and none has to make one as well: torch names later groups of all ranks
    by how many each has made, and does not count this one. Except by
    `dist.new_group(use_local_synchronization=True)`, whose names count every group that a rank has:
    before one by hand, call this on all of its members or on none. Groups of this package agree on
    such numbers by themselves.

    Args:
        device_type: that of the mesh.
    """
    with no_torch_function():
        made = process_group_of((dist.get_rank(),), (), device_type)
    return group_with_axes(made, ())


def _lane(group: Group, lane: int, device: str) -> Group:
    lanes = _lanes.setdefault(group, {})
    if lane not in lanes:
        with no_torch_function():
            made = lane_of(group.process_group, lane, device)
            lanes[lane] = group_with_axes(made, group.axes)
            connect(lanes[lane], device)
    return lanes[lane]


def _dims(mesh: DeviceMesh, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    names = mesh.mesh_dim_names or ()
    dims = tuple(sorted(_dim(mesh, names, axis) for axis in axes))
    if not dims:
        raise CommArgumentError(f"no axis given; the mesh has {_axes_of(mesh)}")
    if len(set(dims)) != len(dims):
        raise CommArgumentError(f"an axis is given twice in {axes}; the mesh has {_axes_of(mesh)}")
    return dims


def _dim(mesh: DeviceMesh, names: tuple[str, ...], axis: Axis) -> int:
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise CommArgumentError(f"unknown mesh axis {axis!r}; the mesh has {_axes_of(mesh)}")


def _axes_of(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return ", ".join(f"{name!r} ({size})" for name, size in zip(names, mesh.shape, strict=True))


def _find(mesh: DeviceMesh, dims: tuple[int, ...]) -> Group:
    """Pick a process group that is there already, if it has the right members in order."""
    ranks = _members(mesh, dims)
    names = mesh.mesh_dim_names or [f"axis{dim}" for dim in range(mesh.ndim)]
    axes = tuple(names[dim] for dim in dims)
    # Axes of one rank add no member, so a group over (dp=1, tp) is the group of tp.
    # Only members join, and they have the same mesh: each of them finds the same `wide`.
    wide = [dim for dim in dims if mesh.size(dim) > 1] or [dims[0]]
    along = [mesh.get_group(dim) for dim in wide]
    for there in (*along, default_process_group()):
        if ranks_of(there) == ranks:
            return group_with_axes(there, axes)
    made = group_with_axes(process_group_of(ranks, along, mesh.device_type), axes)
    # Here, where all members are: they need not all be where it is used first.
    connect(made, mesh.device_type)
    return made


def _members(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CommArgumentError(
            f"rank {dist.get_rank()} is not in the mesh of ranks "
            f"{compact(tuple(mesh.mesh.flatten().tolist()))}"
        )
    index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))
    return tuple(mesh.mesh[index].reshape(-1).tolist())
