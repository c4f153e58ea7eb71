"""All-reduce: every member gets the reduction of the members' tensors."""

from dataclasses import dataclass

from torch import Tensor

from vescale_comm import _flat
from vescale_comm._autograd import Linear, apply, no_gradient
from vescale_comm._check import check_tensor
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._reduction import reduction
from vescale_comm._views import copy


@dataclass(frozen=True, slots=True)
class AllReduce(Linear):
    """Its own adjoint: each output depends in the same way on each input, and the reverse."""

    group: Group
    op: str

    def run(self, x: Tensor) -> Tensor:
        how = reduction(self.op, x.dtype, self.group.backends[x.device.type])
        return _flat.all_reduce(x, self.group, how)

    def adjoint(self) -> "AllReduce":
        if self.op not in ("sum", "avg"):
            no_gradient("all_reduce", self.op)
        return self


def all_reduce(x: Tensor, group: GroupLike = None, *, op: str = "sum") -> Tensor:
    """Reduces the members' tensors element by element; every member gets the result.

    Args:
        x: tensor of any shape and strides, the same shape and dtype on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        op: `"sum"`, `"avg"` (floating-point and complex), `"max"`, `"min"`, `"prod"`, or, for
            integers and booleans, `"band"`, `"bor"`, `"bxor"`. On booleans sum is *or*, prod is
            *and*.

    Returns:
        A new contiguous tensor of the shape and dtype of `x`. 8-bit floats are reduced in fp32 and
        rounded once; avg is the sum, divided at the end.

    Raises:
        CommArgumentError: no such op, not for this dtype, or without a gradient where one is asked
            for; a tensor that is not on a device of the group's backend.
    """
    group = as_group(group)
    check_tensor("all_reduce", x, group)
    reduction(op, x.dtype, group.backends[x.device.type])
    if group.size == 1:
        return copy(x)
    return apply(AllReduce(group, op), x)
