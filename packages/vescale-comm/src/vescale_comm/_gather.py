"""Gathers: every member gets what all members hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from vescale_comm import _flat, _scatter
from vescale_comm._autograd import Linear, apply
from vescale_comm._check import check_dim, check_own, check_shapes, check_sizes, check_tensor
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._reduce import copy
from vescale_comm._views import flattened, views


@dataclass(frozen=True, slots=True)
class AllGather(Linear):
    """Concatenates the members' tensors along `dim`, of which member i holds `sizes[i]`.

    With `mean` the result is divided by the number of members: the adjoint of an average.
    """

    group: Group
    dim: int
    sizes: tuple[int, ...]
    mean: bool = False

    def run(self, x: Tensor) -> Tensor:
        leading, trailing = prod(x.shape[: self.dim]), prod(x.shape[self.dim + 1 :])
        numels = tuple(leading * size * trailing for size in self.sizes)
        flat = _flat.gather(flattened(x), self.group, numels, x)
        if self.mean:
            flat.div_(self.group.size)
        if leading == 1:
            return flat.view(self._shape(x, sum(self.sizes)))
        # The wire brings one member after the other; along an inner dim they interleave.
        pieces = zip(torch.split(flat, list(numels)), self.sizes, strict=True)
        return torch.cat([piece.view(self._shape(x, size)) for piece, size in pieces], self.dim)

    def _shape(self, x: Tensor, size: int) -> tuple[int, ...]:
        return (*x.shape[: self.dim], size, *x.shape[self.dim + 1 :])

    def adjoint(self) -> "_scatter.ReduceScatter":
        op = "avg" if self.mean else "sum"
        return _scatter.ReduceScatter(self.group, self.dim, self.sizes, op)


def all_gather(
    x: Tensor, group: GroupLike = None, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenates the members' tensors along a dim; every member gets the whole.

    Args:
        x: this member's piece, of any strides; the other extents are the same on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        dim: dim to concatenate along; negative counts from the end.
        sizes: extent along `dim` of each member's piece, in the order of the members; zeros are
            allowed. None if all are equal.

    Returns:
        A new contiguous tensor. Along dim 0 (or after dims of extent 1) it is the receive buffer
        itself; along an inner dim it costs one copy. Its gradient is a reduce-scatter.

    Raises:
        CommArgumentError: a dim out of range, sizes that do not fit the group or this rank's piece.
    """
    group = as_group(group)
    check_tensor("all_gather", x, group)
    dim = check_dim("all_gather", dim, tuple(x.shape))
    extent = x.shape[dim]
    if sizes is None:
        sizes = (extent,) * group.size
    else:
        sizes = check_sizes("all_gather", sizes, group)
        check_own("all_gather", "sizes", sizes[group.rank], extent, group)
    if group.size == 1:
        return copy(x)
    return apply(AllGather(group, dim, sizes), x)


def gather_pieces(
    x: Tensor, group: GroupLike = None, *, shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Brings every member's tensor, of whatever shape, to every member, in one collective.

    Args:
        x: this member's tensor, of any strides, also 0-dim or empty.
        group: from `group_of`, a torch process group, or None for the default one.
        shapes: shape of each member's tensor, in the order of the members.

    Returns:
        One contiguous tensor for each member, in their order: views of one receive buffer. Their
        gradients are summed into the member that sent the piece by one reduce-scatter.

    Raises:
        CommArgumentError: shapes that do not fit the group or this rank's tensor.
    """
    group = as_group(group)
    check_tensor("gather_pieces", x, group)
    shapes = check_shapes("gather_pieces", shapes, group)
    check_own("gather_pieces", "shapes", shapes[group.rank], tuple(x.shape), group)
    numels = tuple(prod(shape) for shape in shapes)
    flat = all_gather(x.reshape(-1), group, sizes=numels)
    return views(flat, shapes)
