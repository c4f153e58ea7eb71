"""Broadcast, and the reduction to one member that is its gradient."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from vescale_comm._autograd import Linear, apply
from vescale_comm._check import check_tensor
from vescale_comm._errors import CommArgumentError
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._issue import issue
from vescale_comm._reduction import reduction
from vescale_comm._views import copy
from vescale_comm._wire import moved


@dataclass(frozen=True, slots=True)
class Broadcast(Linear):
    """Every member gets the tensor of member `source`."""

    group: Group
    source: int

    def run(self, x: Tensor) -> Tensor:
        here = self.group.rank == self.source
        # Only the source's values count; elsewhere x says shape and dtype.
        out = copy(x) if here else x.new_empty(x.shape)
        sent = (self.group.size - 1) * x.nbytes if here else 0
        root = self.group.ranks[self.source]
        issue("broadcast", self.group, sent, x, dist.broadcast, moved(out.view(-1)), root)
        return out

    def adjoint(self) -> "ReduceTo":
        return ReduceTo(self.group, self.source)


@dataclass(frozen=True, slots=True)
class ReduceTo(Linear):
    """Member `target` gets the sum of the members' tensors, the others zeros."""

    group: Group
    target: int

    def run(self, x: Tensor) -> Tensor:
        here = self.group.rank == self.target
        how = reduction("sum", x.dtype, self.group.backends[x.device.type])
        buffer = how.encode(copy(x).view(-1))
        sent = 0 if here else buffer.nbytes
        root = self.group.ranks[self.target]
        issue("reduce", self.group, sent, x, dist.reduce, buffer, root, op=how.native)
        # Away from the target the buffer holds whatever the backend left in it.
        out = buffer if here else buffer.zero_()
        return how.finish(out, self.group.size).view(x.shape)

    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.target)


def broadcast(x: Tensor, group: GroupLike = None, *, source: int = 0) -> Tensor:
    """Gives every member the tensor of one.

    Args:
        x: the tensor at the source; elsewhere any tensor of its shape and dtype.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.

    Returns:
        A new contiguous tensor. Its gradient is the sum over members, at the source, and zero
        elsewhere.

    Raises:
        CommArgumentError: no such member.
    """
    group = as_group(group)
    check_tensor("broadcast", x, group)
    if not 0 <= source < group.size:
        raise CommArgumentError(
            f"broadcast: source={source} is not a member of {group.name}, which counts 0 to "
            f"{group.size - 1}"
        )
    if group.size == 1:
        return copy(x)
    return apply(Broadcast(group, source), x)


def barrier(group: GroupLike = None) -> None:
    """Returns when every member has called it."""
    group = as_group(group)
    if group.size > 1:
        issue("barrier", group, 0, None, dist.barrier)
