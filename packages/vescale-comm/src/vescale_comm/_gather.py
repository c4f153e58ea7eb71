"""Gathers: every member gets what all members hold."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from vescale_comm._autograd import apply
from vescale_comm._check import check_dim, check_own, check_shapes, check_sizes, check_tensor
from vescale_comm._group import GroupLike, as_group
from vescale_comm._pieces import AllGather
from vescale_comm._views import copy, views


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
