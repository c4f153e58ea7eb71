"""Make process groups by their members alone, without the other ranks of the world."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vescale_comm._errors import CommError
from vescale_comm._groups.group import default_process_group, ranks_of
from vescale_comm._torch.compat import (
    can_order_ranks,
    counts_new_groups,
    is_registered,
    new_groups_numbered,
    process_group_count,
)
from vescale_comm._torch.own_calls import own_calls

_Key = tuple[tuple[int, ...], str]

# What was made here, by the default process group: it dies with the world that it belongs to.
_made: "weakref.WeakKeyDictionary[ProcessGroup, dict[_Key, weakref.ref[ProcessGroup]]]" = (
    weakref.WeakKeyDictionary()
)


# What was made as a further lane, by the process group that has the same ranks, and by number.
_lanes: "weakref.WeakKeyDictionary[ProcessGroup, dict[int, weakref.ref[ProcessGroup]]]" = (
    weakref.WeakKeyDictionary()
)


# How many groups there have to be before another one of these ranks is made, by the default process
# group, where torch names them by that number: a name that was given before, to a group that has
# been destroyed, leads to the addresses that it left in the store.
_named_by: "weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], int]]" = (
    weakref.WeakKeyDictionary()
)


# How long collectives of such groups wait, by the default process group as well.
_timeouts: "weakref.WeakKeyDictionary[ProcessGroup, timedelta]" = weakref.WeakKeyDictionary()


# The next number of such a group, by the default process group, where torch names them by numbers.
_numbers: "weakref.WeakKeyDictionary[ProcessGroup, int]" = weakref.WeakKeyDictionary()
_OUR_NUMBERS = 1_000_000
"""Above what torch counts to by itself, so that no name is given twice."""


def use_timeout(timeout: timedelta) -> None:
    """Make later groups of this world with a timeout; torch gives each its backend's own."""
    _timeouts[default_process_group()] = timeout


def process_group_of(
    ranks: tuple[int, ...], along: Sequence[ProcessGroup], device: str
) -> ProcessGroup:
    """Make a process group of these ranks, in this order, or find the one made before.

    Reuse is safe: all members of a list of ranks, and only they, pass here at the same points of
    their programs, so the cache looks the same to each of them.

    Args:
        ranks: global ranks of the members; this one is among them.
        along: existing groups of this rank that together span the members: one for each axis of
            their mesh. None where this rank is the only member.
        device: type of a device that these communicate from.
    """
    backend = dist.get_backend_config(along[0] if along else default_process_group())
    made = _made.setdefault(default_process_group(), {})
    known = made[ranks, backend]() if (ranks, backend) in made else None
    # A group that was destroyed may live on where somebody holds it.
    if known is not None and is_registered(known):
        return known
    process_group = _made_by_members(ranks, along, device, backend)
    # Weak: torch owns it. A strong reference would keep its sockets after it is destroyed.
    made[ranks, backend] = weakref.ref(process_group)
    return process_group


def lane_of(like: ProcessGroup, lane: int, device: str) -> ProcessGroup:
    """Make another process group of the same ranks in the same order, or find the one made before.

    Args:
        like: the ranks, who all come here.
        lane: tells apart those that have the same ranks.
        device: type of a device that it communicates from.
    """
    lanes = _lanes.setdefault(like, {})
    known = lanes[lane]() if lane in lanes else None
    if known is not None and is_registered(known):
        return known
    made = _made_by_members(ranks_of(like), [like], device, dist.get_backend_config(like))
    lanes[lane] = weakref.ref(made)
    return made


def _made_by_members(
    ranks: tuple[int, ...], along: Sequence[ProcessGroup], device: str, backend: str
) -> ProcessGroup:
    if counts_new_groups():
        with new_groups_numbered(_next_number(along, device)):
            return _new_group(list(ranks), backend)
    # Destroyed below: they exist only so that torch counts alike on all members.
    numbers = _named_by.setdefault(default_process_group(), {})
    same = tuple(sorted(ranks))
    fillers = _catch_up(along, device, numbers.get(same, 0))
    numbers[same] = (process_group_count() or 0) + 1
    process_group = _new_group(list(ranks), backend)
    for filler in fillers:
        dist.destroy_process_group(filler)
    return process_group


def _next_number(along: Sequence[ProcessGroup], device: str) -> int:
    """Return a number for a new group that its members share, and had for no group before."""
    default = default_process_group()
    number = _largest(_numbers.get(default, _OUR_NUMBERS), along, device)
    _numbers[default] = number + 1
    return number


def _largest(mine: int, along: Sequence[ProcessGroup], device: str) -> int:
    most = torch.tensor(mine, dtype=torch.int64, device=device)
    for process_group in along:
        # One axis after the other: after the last, every member has the maximum over all of them.
        with own_calls(process_group):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=process_group)
    return int(most.item())


def _catch_up(along: Sequence[ProcessGroup], device: str, least: int) -> list[ProcessGroup]:
    """Make groups of this rank alone until all members have equally many, and at least so many.

    torch derives the name under which the members of a new group look for each other from how many
    groups a process has; members that have made different numbers would wait for ever.
    """
    count = process_group_count()
    if count is None:
        return []
    lacking = range(_largest(max(count, least), along, device) - count)
    me = [dist.get_rank()]
    return [dist.new_group(me, use_local_synchronization=True) for _ in lacking]


def _new_group(ranks: list[int], backend: str) -> ProcessGroup:
    members: list[int] = ranks
    order: dict[str, Any] = {}
    if ranks != sorted(ranks) and can_order_ranks():
        order = {"sort_ranks": False}
    elif ranks != sorted(ranks):
        members = [_Member(rank, place) for place, rank in enumerate(ranks)]
    with _unbound(default_process_group()):
        made: ProcessGroup = dist.new_group(
            members,
            _timeouts.get(default_process_group()),
            backend=backend,
            use_local_synchronization=True,
            **order,
        )
    # Data of wrong ranks would be right in shape: so it is asked for, and not believed.
    if (found := ranks_of(made)) != tuple(ranks):
        raise CommError(
            f"torch {torch.__version__} made a process group of ranks {list(found)} where one in "
            f"the order {ranks} was asked for: use a mesh whose ranks ascend along these axes, or "
            "torch 2.12 or later"
        )
    return made


@contextmanager
def _unbound(world: ProcessGroup) -> Iterator[None]:
    """While entered, the world is bound to no device.

    After `init_process_group(device_id=...)` torch splits the world's communicator for each new
    group, in which all ranks of the world have to take part, and only the members come here.
    """
    bound = world.bound_device_id
    if bound is not None:
        world.bound_device_id = None
    try:
        yield
    finally:
        if bound is not None:
            world.bound_device_id = bound


class _Member(int):
    """A rank that sorts by its place in a group: there is no other way past torch 2.11's sort."""

    def __new__(cls, rank: int, place: int) -> "_Member":
        made = super().__new__(cls, rank)
        made.place = place
        return made

    place: int

    def __lt__(self, other: int) -> bool:
        # Beside a plain number, such as the size of the world, it is the rank that it is.
        return self.place < other.place if isinstance(other, _Member) else int(self) < other
