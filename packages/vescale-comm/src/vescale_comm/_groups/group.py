"""Groups of ranks: what every collective runs on."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vescale_comm._errors import CommArgumentError, CommError
from vescale_comm._torch.compat import is_registered, process_group_named
from vescale_comm._torch.ranks import compact
from vescale_comm._watchdog.current_watcher import execution_log, start
from vescale_comm._watchdog.execution_log import ExecutionLog, WatchedGroup


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
        tag: name by which torch knows the process group, in graphs for example.
    """

    ranks: tuple[int, ...]
    size: int
    rank: int
    axes: tuple[str, ...]
    backends: Mapping[str, str]
    # torch owns a process group until it is destroyed; a strong reference here would keep the
    # sockets of a destroyed one open for as long as somebody's mesh is cached.
    _process_group: Callable[[], ProcessGroup | None] = field(repr=False)
    # How calls that were made before are carried: a cache, bounded by the dtypes and ops there are.
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)
    tag: str = ""
    # What the members execute together, compared beside the program; None where nothing is.
    _log: ExecutionLog | None = field(default=None, repr=False)
    # Whether gloo is among the backends: asked at every small call.
    _has_gloo: bool = field(default=False, repr=False)

    @property
    def process_group(self) -> ProcessGroup:
        """The torch process group that carries this group's collectives.

        Raises:
            CommError: it was destroyed (`torch.distributed.destroy_process_group`).
        """
        process_group = self._process_group()
        # Destroyed, it lives on where a mesh still holds it, and would hang or worse.
        if process_group is None or not is_registered(process_group):
            raise CommError(f"{self!r} was used after its process group was destroyed")
        return process_group

    @property
    def name(self) -> str:
        """Short name for messages and traces: the axes, else the ranks."""
        return "*".join(self.axes) if self.axes else f"ranks {compact(self.ranks)}"

    def __repr__(self) -> str:
        return f"Group({self.name}, size={self.size}, rank={self.rank})"


GroupLike = Group | ProcessGroup | None
"""What every function takes for a group: ours, torch's, or None for the default process group."""

# Torch's process groups die when they are destroyed; a `Group` refers to its own weakly, so that
# neither is kept alive by the other.
_known: "weakref.WeakKeyDictionary[ProcessGroup, Group]" = weakref.WeakKeyDictionary()


def as_group(group: GroupLike | str = None) -> Group:
    """Return the `Group` for a torch process group, for its name, or for the default one (None).

    Names are what collectives in a traced graph have in the place of groups.
    """
    if isinstance(group, Group):
        return group
    if isinstance(group, str):
        try:
            group = process_group_named(group)
        except RuntimeError as error:
            raise _no_group(group) from error
    process_group = default_process_group() if group is None else group
    # What new_group returns to those that are not in it.
    if cast(object, process_group) is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommArgumentError(
            f"rank {dist.get_rank()} is not a member of the group that it was given"
        )
    if not isinstance(process_group, ProcessGroup):
        raise _no_group(group)
    known = _known.get(process_group)
    if known is None:
        known = _known[process_group] = group_with_axes(process_group, ())
    return known


def _no_group(given: object) -> CommArgumentError:
    return CommArgumentError(
        f"not a group: {given!r}. Pass group_of(mesh, axes), a torch ProcessGroup or its name, or "
        "None for the default one"
    )


def group_with_axes(process_group: ProcessGroup, axes: tuple[str, ...]) -> Group:
    """Make the `Group` of a process group; `axes` are those that it flattens."""
    ranks = ranks_of(process_group)
    # A group of the user's may be another thread's, whose calls fall anywhere among the others.
    own = not axes and process_group is not dist.group.WORLD
    start()  # the first group of a world: from here on somebody may wait
    backends = _backends_of(process_group)
    return Group(
        ranks=ranks,
        size=len(ranks),
        rank=dist.get_rank(process_group),
        axes=axes,
        backends=backends,
        _process_group=weakref.ref(process_group),
        tag=process_group.group_name,
        _log=_log_of(process_group, ranks, process_group.group_name if own else ""),
        _has_gloo="gloo" in backends.values(),
    )


def _log_of(process_group: ProcessGroup, ranks: tuple[int, ...], name: str) -> ExecutionLog | None:
    # A simulation compares the calls of a group where its members meet.
    return None if isinstance(process_group, WatchedGroup) else execution_log(ranks, name)


def ranks_of(process_group: ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of the members, in their order."""
    return tuple(map(int, dist.get_process_group_ranks(process_group)))


def default_process_group() -> ProcessGroup:
    """Return torch's default process group, or say that there is none."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise CommError(
            "there is no default process group: call torch.distributed.init_process_group first, "
            "or pass a group"
        )
    return world


def _backends_of(process_group: ProcessGroup) -> Mapping[str, str]:
    # The public form of this is text: "cpu:gloo,cuda:nccl".
    pairs = (pair.partition(":") for pair in dist.get_backend_config(process_group).split(","))
    return MappingProxyType({device: backend for device, _, backend in pairs})
