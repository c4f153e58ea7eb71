"""Reduce-scatter: each member gets its piece of the reduction of the members' tensors."""

from collections.abc import Sequence

from torch import Tensor

from vescale_comm._autograd import apply
from vescale_comm._check import check_dim, check_sizes, check_tensor
from vescale_comm._errors import CommArgumentError
from vescale_comm._group import Group, GroupLike, as_group
from vescale_comm._pieces import ReduceScatter
from vescale_comm._reduction import reduction
from vescale_comm._views import copy


def reduce_scatter(
    x: Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
) -> Tensor:
    """Reduces the members' tensors and cuts the result along a dim, a piece for each member.

    Args:
        x: tensor of any strides, the same shape and dtype on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        dim: dim to cut along; negative counts from the end.
        sizes: extent along `dim` of each member's piece, in the order of the members; they sum to
            the extent of `x`, zeros are allowed. None for equal pieces.
        op: as for `all_reduce`.

    Returns:
        This member's piece, new and contiguous. Along dim 0 (or after dims of extent 1) a
        contiguous `x` is sent as it is; along an inner dim it is copied once. Its gradient is an
        all-gather.

    Raises:
        CommArgumentError: a dim out of range, sizes that do not sum to the extent, an extent that
            equal pieces do not divide, an op that does not exist or has no gradient.
    """
    group = as_group(group)
    check_tensor("reduce_scatter", x, group)
    reduction(op, x.dtype, group.backends[x.device.type])
    dim = check_dim("reduce_scatter", dim, tuple(x.shape))
    cut = _cut(x.shape[dim], dim, sizes, group)
    if group.size == 1:
        return copy(x)
    return apply(ReduceScatter(group, dim, cut, op), x)


def _cut(extent: int, dim: int, sizes: Sequence[int] | None, group: Group) -> tuple[int, ...]:
    if sizes is None:
        if extent % group.size:
            raise CommArgumentError(
                f"reduce_scatter over {group.name}: extent {extent} of dim {dim} is not divisible "
                f"by {group.size} members; say how to cut it with sizes="
            )
        return (extent // group.size,) * group.size
    sizes = check_sizes("reduce_scatter", sizes, group)
    if sum(sizes) != extent:
        raise CommArgumentError(
            f"reduce_scatter over {group.name}: sizes={sizes} sum to {sum(sizes)}, but dim {dim} "
            f"has extent {extent}"
        )
    return sizes
