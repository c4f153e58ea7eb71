"""Communicators, which NCCL makes in a group's first call: every member has to take part in it.

A message between two members, or a permutation that leaves some out, must not be that call: those
that come would wait for those that do not. `connect` is called where all members are known to be.
"""

from collections.abc import Mapping
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vescale_comm._groups.group import Group
from vescale_comm._torch.own_calls import own_calls

_connected: "WeakSet[ProcessGroup]" = WeakSet()


def connects_late(group: Group, device: str) -> bool:
    """Return whether the group's communicator is perhaps still to be made, in its next call."""
    if group.backends.get(device) != "nccl":
        return False
    return group.size > 1 and group.process_group not in _connected


def connect(group: Group, device: torch.device | str) -> None:
    """Have the communicator made, if it is to be. Collective: every member calls it."""
    # A device without an index is the current one.
    where = torch.device(device)
    if connects_late(group, where.type):
        with own_calls(group.process_group):
            dist.all_reduce(torch.zeros(1, device=where), group=group.process_group)
        _connected.add(group.process_group)


def barrier_devices(backends: Mapping[str, str]) -> list[int] | None:
    """Return where a barrier of a group with these backends is: None for the host."""
    # Not said, it is the current device as well, with a warning.
    if "cpu" in backends or not torch.accelerator.is_available():
        return None
    return [torch.accelerator.current_device_index()]


def note_connected(group: Group, device: str) -> None:
    """Note that all members have taken part in a call."""
    if connects_late(group, device):
        _connected.add(group.process_group)
