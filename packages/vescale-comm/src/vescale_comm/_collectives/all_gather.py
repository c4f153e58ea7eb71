"""All-gather: every member gets the tensors of all members, concatenated or one by one."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import (
    Shape,
    check_dim,
    check_own,
    check_shapes,
    check_sizes,
    check_tensor,
)
from vescale_comm._engine.fast_path import fast_all_gather, is_fast, note_checked
from vescale_comm._engine.handles import ready, run_or_start
from vescale_comm._engine.operators import call, flat_shapes, name_of, register, shapes_of
from vescale_comm._engine.sharded_dim import LinearAllGather
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy, views


def all_gather(
    x: Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor:
    """Concatenate the members' tensors along a dim; every member gets the result.

    Args:
        x: this member's shard, of any strides; the other extents are the same on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        dim: dim to concatenate along; negative counts from the end.
        sizes: extent along `dim` of each member's tensor, in the order of the members; zeros are
            allowed. None if all are equal.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        A new contiguous tensor. Along dim 0 (or after dims of extent 1) it is the receive buffer
        itself; along an inner dim it costs one copy. Its gradient is a reduce-scatter.

    Raises:
        CommArgumentError: a dim out of range, sizes that do not fit the group or `x`.
    """
    # First of all: the compiler must not look into groups or into the cache of the fast path.
    if is_compiling():
        return cast(Tensor, call("all_gather", x, name_of(group), dim, sizes, async_op=async_op))
    # Two cheap tests on the way of every small call; what they leave out is checked in full.
    if type(group) is not Group:
        group = as_group(group)
    if sizes is None and not async_op and is_fast("all_gather", x, group):
        if dim == 0:
            return fast_all_gather(x, group)
        return fast_all_gather(x, group, check_dim("all_gather", dim, tuple(x.shape)))
    return _all_gather(x, group, dim, sizes, async_op)


def _all_gather(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None, async_op: bool = False
) -> Tensor:
    collective = plan_all_gather(x, group, dim, sizes)
    if group.size == 1:
        # Copied: with one member, too, the result is never the caller's memory.
        return cast(Tensor, ready("all_gather", copy(x), async_op))
    # Only after the plan has accepted it: from here on `is_fast` skips those checks.
    note_checked("all_gather", x, group)
    return cast(Tensor, run_or_start("all_gather", collective, x, async_op))


register("all_gather(Tensor x, str group, int dim, SymInt[]? sizes) -> Tensor", _all_gather)


def plan_all_gather(
    x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None
) -> LinearAllGather:
    """Check the arguments of `all_gather`."""
    check_tensor("all_gather", x, group)
    dim = check_dim("all_gather", dim, tuple(x.shape))
    extent = x.shape[dim]
    if sizes is None:
        # A claim about the others that no rank can check by itself; `checked` compares it.
        sizes = (extent,) * group.size
    else:
        sizes = check_sizes("all_gather", sizes, group)
        check_own("all_gather", "sizes", sizes[group.rank], extent, group)
    return LinearAllGather(group, dim, sizes)


def gather_pieces(
    x: Tensor,
    group: GroupLike = None,
    *,
    shapes: Sequence[Sequence[int]],
    async_op: bool = False,
) -> list[Tensor]:
    """Gather every member's tensor, of any shape, on every member, in one collective.

    Args:
        x: this member's tensor, of any strides, also 0-dim or empty.
        group: from `group_of`, a torch process group, or None for the default one.
        shapes: shape of each member's tensor, in the order of the members.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        One contiguous tensor for each member, in their order: views of one receive buffer. Their
        gradients are summed into the member that sent the tensor by one reduce-scatter.

    Raises:
        CommArgumentError: shapes that do not fit the group or this rank's tensor.
    """
    if is_compiling():
        # A schema has no lists of lists: shapes travel as their numbers of dims and all extents.
        dims, extents = flat_shapes(shapes)
        found = call("gather_pieces", x, name_of(group), dims, extents, async_op=async_op)
        return cast(list[Tensor], found)
    return _gather_pieces(x, as_group(group), shapes, async_op)


def _gather_pieces(
    x: Tensor, group: Group, shapes: Sequence[Sequence[int]], async_op: bool = False
) -> list[Tensor]:
    collective, flat, shapes = plan_gather_pieces(x, group, shapes)
    result: list[Tensor]
    if group.size == 1:
        result = ready("gather_pieces", views(copy(flat), shapes), async_op)
    else:
        # Split outside of the autograd node: views of its one output, so that one collective runs
        # backward whichever of them are used.
        cut = partial(views, shapes=shapes)
        result = run_or_start("gather_pieces", collective, flat, async_op, cut)
    return result


register(
    "gather_pieces(Tensor x, str group, int[] dims, SymInt[] extents) -> Tensor[]",
    lambda x, group, dims, extents: _gather_pieces(x, group, shapes_of(dims, extents)),
)


def plan_gather_pieces(
    x: Tensor, group: Group, shapes: Sequence[Sequence[int]]
) -> tuple[LinearAllGather, Tensor, tuple[Shape, ...]]:
    """Check the arguments; return the collective, its flat input and the shapes of the result."""
    check_tensor("gather_pieces", x, group)
    shapes = check_shapes("gather_pieces", shapes, group)
    check_own("gather_pieces", "shapes", shapes[group.rank], tuple(x.shape), group)
    numels = tuple(prod(shape) for shape in shapes)
    # Flat, because the shapes may differ in every dim: dim 0 of the flat tensors is all that
    # counts.
    return LinearAllGather(group, 0, numels), x.reshape(-1), shapes
