"""Groups of ranks: one mesh axis, several axes flattened into one, or a plain process group."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from vescale_comm._errors import CommArgumentError, CommError
from vescale_comm._identity import WeakById


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, repr=False)
class Group:
    """An ordered set of ranks that communicate with each other.

    Obtained from `group_of` or `as_group`, never constructed by hand. Two groups are equal only if
    they are the same object.

    Attributes:
        ranks: global ranks of the members; a member's index in this tuple is its rank *in* the
            group, which is what `source=`, `sizes=` and `shapes=` count in.
        size: number of members.
        rank: index of this process among the members.
        axes: names of the mesh axes that the group flattens, in mesh order; empty for a group that
            did not come from a mesh.
        backends: name of the backend that serves each device type, such as `{"cpu": "gloo"}`.
    """

    ranks: tuple[int, ...]
    size: int
    rank: int
    axes: tuple[str, ...]
    backends: Mapping[str, str]
    # torch owns a process group until it is destroyed; a strong reference here would keep the
    # sockets of a destroyed one open for as long as somebody's mesh is cached.
    _process_group: "weakref.ref[ProcessGroup]" = field(repr=False)

    @property
    def process_group(self) -> ProcessGroup:
        """The torch process group that carries this group's collectives.

        Raises:
            CommError: it was destroyed (`torch.distributed.destroy_process_group`).
        """
        process_group = self._process_group()
        if process_group is None:
            raise CommError(f"{self!r} was used after its process group was destroyed")
        return process_group

    @property
    def name(self) -> str:
        """Short name for messages and traces: the axes, else the ranks."""
        return "*".join(self.axes) if self.axes else f"ranks {_compact(self.ranks)}"

    def __repr__(self) -> str:
        return f"Group({self.name}, size={self.size}, rank={self.rank})"


GroupLike = Group | ProcessGroup | None
"""What every function takes for a group: ours, torch's, or None for the default process group."""

Axis = str | int
_Made = tuple[tuple[int, ...], str]

# All three are caches with weak keys; their values refer to process groups weakly, so that nothing
# here outlives the mesh or the process group that it was made for.
_of_process_group: "weakref.WeakKeyDictionary[ProcessGroup, Group]" = weakref.WeakKeyDictionary()
_of_mesh: WeakById[DeviceMesh, dict[Axis | tuple[Axis, ...], Group]] = WeakById()
# Process groups that were made here, by default process group: ranks and backend, to the group.
_made: "weakref.WeakKeyDictionary[ProcessGroup, dict[_Made, weakref.ref[ProcessGroup]]]" = (
    weakref.WeakKeyDictionary()
)


def as_group(group: GroupLike = None) -> Group:
    """Returns the `Group` for a torch process group, or for the default one (None)."""
    if isinstance(group, Group):
        return group
    process_group = _default() if group is None else group
    if not isinstance(process_group, ProcessGroup):
        raise CommArgumentError(
            f"not a group: {group!r}. Pass group_of(mesh, axes), a torch ProcessGroup, or None for "
            "the default one"
        )
    known = _of_process_group.get(process_group)
    if known is None:
        known = _wrap(process_group, ())
        _of_process_group[process_group] = known
    return known


def group_of(mesh: DeviceMesh, axes: Axis | Sequence[Axis]) -> Group:
    """Returns the group of ranks that differ from this one only along the given mesh axes.

    Several axes give one flattened group: its members are in row-major order over those axes, in
    the mesh's order whatever the order they are named in. It is made at first use, by its members
    only, and kept for the mesh's lifetime; so every member has to ask for it at the same point of
    the program, as for any collective.

    Args:
        mesh: a `torch.distributed.DeviceMesh` that contains this rank.
        axes: one axis or several, each by name or by index (negative counts from the end).

    Raises:
        CommArgumentError: an axis that the mesh does not have, none at all, one named twice, or a
            mesh that this rank is not in.

    Example:
        group_of(mesh, "tp")            # this rank's row of tp
        group_of(mesh, ("dp", "cp"))    # one group over both
    """
    key = axes if isinstance(axes, str | int) else tuple(axes)
    known = _of_mesh.get(mesh)
    if known is not None and key in known:
        return known[key]
    if not isinstance(mesh, DeviceMesh):
        raise CommArgumentError(f"group_of takes a DeviceMesh, not {type(mesh).__name__}")
    group = _find(mesh, _dims(mesh, (key,) if isinstance(key, str | int) else key))
    # No lock: members make groups in program order, so a second thread would be an error already.
    _of_mesh.setdefault(mesh, {})[key] = group
    return group


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
    """Picks the cheapest process group with the right members in the right order."""
    ranks = _members(mesh, dims)
    axes = tuple(_axis_name(mesh, dim) for dim in dims)
    # Axes of one rank add no member, so a group over (dp=1, tp) is the group of tp.
    wide = [dim for dim in dims if mesh.size(dim) > 1] or [dims[0]]
    if len(wide) == 1:
        candidate = mesh.get_group(wide[0])
        if _ranks_of(candidate) == ranks:
            return _wrap(candidate, axes)
    default = _default()
    if _ranks_of(default) == ranks:
        return _wrap(default, axes)
    return _make(default, ranks, dist.get_backend_config(mesh.get_group(wide[0])), axes)


def _make(
    default: ProcessGroup, ranks: tuple[int, ...], backend: str, axes: tuple[str, ...]
) -> Group:
    """Makes a process group, or reuses the one made before for the same ranks in this world.

    Reuse is safe: all members of a rank list, and only they, pass here at the same points of their
    programs, so the cache looks the same to each of them.
    """
    made = _made.setdefault(default, {})
    process_group = made[ranks, backend]() if (ranks, backend) in made else None
    if process_group is None:
        process_group = _new_group(list(ranks), backend)
        made[ranks, backend] = weakref.ref(process_group)
    return _wrap(process_group, axes)


def _new_group(ranks: list[int], backend: str) -> ProcessGroup:
    # torch sorts the ranks unless told otherwise, and could not always be told.
    order: dict[str, Any] = {}
    if ranks != sorted(ranks):
        if "sort_ranks" not in signature(dist.new_group).parameters:
            raise CommError(
                f"torch {torch.__version__} cannot make a process group with members in the order "
                f"{ranks}: use a mesh whose ranks ascend along these axes"
            )
        order = {"sort_ranks": False}
    made: ProcessGroup = dist.new_group(
        ranks, backend=backend, use_local_synchronization=True, **order
    )
    return made


def _members(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise CommArgumentError(
            f"rank {dist.get_rank()} is not in the mesh of ranks "
            f"{_compact(tuple(mesh.mesh.flatten().tolist()))}"
        )
    index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))
    members = mesh.mesh[index].reshape(-1).tolist()
    assert len(members) == prod(mesh.size(dim) for dim in dims)
    return tuple(members)


def _wrap(process_group: ProcessGroup, axes: tuple[str, ...]) -> Group:
    ranks = _ranks_of(process_group)
    return Group(
        ranks=ranks,
        size=len(ranks),
        rank=dist.get_rank(process_group),
        axes=axes,
        backends=_backends_of(process_group),
        _process_group=weakref.ref(process_group),
    )


def _backends_of(process_group: ProcessGroup) -> Mapping[str, str]:
    # The public form of this is text: "cpu:gloo,cuda:nccl".
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return MappingProxyType({device: backend for device, _, backend in pairs})


def _ranks_of(process_group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(process_group))


def _axis_name(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"axis{dim}"


def _default() -> ProcessGroup:
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise CommError(
            "there is no default process group: call torch.distributed.init_process_group first, "
            "or pass a group"
        )
    return world


def _compact(ranks: tuple[int, ...]) -> str:
    """Writes consecutive ranks as a range: (0, 1, 2, 3) is "0-3"."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
