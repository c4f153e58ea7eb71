"""Broadcast from one member, the reduction to one member that is its gradient, and the barrier."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import check_member, check_tensor
from vescale_comm._engine.autograd import Linear
from vescale_comm._engine.handles import ready, run_or_start
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.primitives import Barrier, Broadcast, Reduce, Steps
from vescale_comm._engine.runner import complete
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, depending_on, nbytes
from vescale_comm._wire.reduction import reduction


@dataclass(frozen=True, slots=True)
class LinearBroadcast(Linear):
    """Every member gets the tensor of member `source`."""

    group: Group
    source: int

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Send the source's tensor; the others receive it."""
        here = self.group.rank == self.source
        # Only the source's values count; elsewhere x says shape and dtype.
        out = copy(x) if here else x.new_empty(x.shape)
        sent = (self.group.size - 1) * nbytes(x) if here else 0
        flat = out.view(-1)
        (filled,) = yield Broadcast("broadcast", self.group, sent, x, flat, self.source)
        return filled.view(x.shape)

    def adjoint(self) -> "LinearReduce":
        """Return the reduction to the source."""
        return LinearReduce(self.group, self.source)


@dataclass(frozen=True, slots=True)
class LinearReduce(Linear):
    """Member `target` gets the sum of the members' tensors, the others zeros."""

    group: Group
    target: int

    def steps(self, x: Tensor) -> Steps[Tensor]:
        """Reduce to the target; the others get zeros."""
        here = self.group.rank == self.target
        how = reduction("sum", x.dtype, self.group.backends[x.device.type])
        # A copy: backends reduce in place, and also away from the target.
        buffer = how.encode(copy(x).view(-1))
        sent = 0 if here else nbytes(buffer)
        (total,) = yield Reduce("reduce", self.group, sent, x, buffer, how.backend_op, self.target)
        # Away from the target the buffer holds whatever the backend left in it.
        out = total if here else depending_on(torch.zeros_like(total), [total])
        return how.finish(out, self.group.size).view(x.shape)

    def adjoint(self) -> LinearBroadcast:
        """Return the broadcast from the target."""
        return LinearBroadcast(self.group, self.target)


def broadcast(
    x: Tensor, group: GroupLike = None, *, source: int = 0, async_op: bool = False
) -> Tensor:
    """Give every member the tensor of one.

    Args:
        x: the tensor at the source; elsewhere any tensor of its shape and dtype.
        group: from `group_of`, a torch process group, or None for the default one.
        source: the member that sends, counted within the group.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        A new contiguous tensor. Its gradient is the sum over members, at the source, and zero
        elsewhere.

    Raises:
        CommArgumentError: no such member.
    """
    if is_compiling():
        return cast(Tensor, call("broadcast", x, name_of(group), source, async_op=async_op))
    return _broadcast(x, as_group(group), source, async_op)


def _broadcast(x: Tensor, group: Group, source: int, async_op: bool = False) -> Tensor:
    check_tensor("broadcast", x, group)
    check_member("broadcast", "source", source, group)
    if group.size == 1:
        return cast(Tensor, ready("broadcast", copy(x), async_op))
    # Each rank's own `x` decides whether its graph gets a node, also where the values do not count:
    # `requires_grad` has to be alike on all members, because the backward is a collective.
    result = run_or_start("broadcast", LinearBroadcast(group, source), x, async_op)
    return cast(Tensor, result)


register("broadcast(Tensor x, str group, int source) -> Tensor", _broadcast)


def barrier(group: GroupLike = None) -> None:
    """Return when every member has called it."""
    group = as_group(group)
    # A group of one has no other member to wait for, and some backends refuse a barrier of one.
    if group.size > 1:
        complete(_barrier(group))


def _barrier(group: Group) -> Steps[None]:
    yield Barrier("barrier", group, 0, None)
