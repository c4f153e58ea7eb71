"""Reduce-scatter: each member gets its shard of the reduction of the members' tensors."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vescale_comm._checks.arguments import check_dim, check_tensor
from vescale_comm._checks.chunk_sizes import chunk_sizes
from vescale_comm._collectives.compressed_reductions import CompressedReduceScatter
from vescale_comm._engine.autograd import Linear
from vescale_comm._engine.fast_path import (
    StartedFold,
    StartedScatter,
    fast_reduce_scatter,
    is_fast,
    note_checked,
)
from vescale_comm._engine.handles import Pending, identity, ready, run_or_start
from vescale_comm._engine.operators import call, name_of, register
from vescale_comm._engine.sharded_dim import LinearReduceScatter
from vescale_comm._groups.group import Group, GroupLike, as_group
from vescale_comm._torch.buffers import copy
from vescale_comm._wire.fold import Order
from vescale_comm._wire.formats import Feedback, Wire, check_traceable, check_wire
from vescale_comm._wire.reduction import reduction

# Under which name calls of an op are known.
_FAST_KEYS = {"sum": "reduce_scatter", "avg": "reduce_scatter, averaged"}
_FOLD_KEYS = {"sum": "reduce_scatter, by rank", "avg": "reduce_scatter, by rank, averaged"}
_FOLDED = frozenset({torch.float32, torch.float64})


def reduce_scatter(
    x: Tensor,
    group: GroupLike = None,
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    order: Order = "native",
    wire: Wire | None = None,
    feedback: Feedback | None = None,
    async_op: bool = False,
) -> Tensor:
    """Reduce the members' tensors and split the result along a dim, one shard for each member.

    Args:
        x: tensor of any strides, the same shape and dtype on every member.
        group: from `group_of`, a torch process group, or None for the default one.
        dim: dim to split along; negative counts from the end.
        sizes: extent along `dim` of each member's shard, in the order of the members; they sum to
            the extent of `x`, zeros are allowed. None for equal shards.
        op: as for `all_reduce`.
        order: as for `all_reduce`: of the fold, which has the same bits for all sizes.
        wire: as for `all_reduce`.
        feedback: as for `all_reduce`.
        async_op: whether to return a `Pending` handle at once.

    Returns:
        This member's shard, new and contiguous. Along dim 0 (or after dims of extent 1) a
        contiguous `x` is sent as it is; along an inner dim it is copied once. Its gradient is an
        all-gather.

    Raises:
        CommArgumentError: a dim out of range, sizes that do not sum to the extent, an extent that
            equal shards do not divide, an op that does not exist or has no gradient.
    """
    if is_compiling():
        check_traceable("reduce_scatter", feedback)
        how = dim, sizes, op, order, wire
        return cast(Tensor, call("reduce_scatter", x, name_of(group), *how, async_op=async_op))
    if type(group) is not Group:
        group = as_group(group)
    plain = order == "native" and _is_plain(sizes, wire, feedback)
    if plain and not (async_op and dim) and is_fast(_FAST_KEYS.get(op, ""), x, group):
        along = check_dim("reduce_scatter", dim, tuple(x.shape)) if dim else 0
        # Not part of the key: the extent differs from call to call, and the full check names it.
        if x.shape[along] % group.size == 0:
            if async_op:
                started = StartedScatter(x, group, mean=op == "avg")
                return cast(Tensor, Pending("reduce_scatter", started, identity))
            return fast_reduce_scatter(x, group, along, mean=op == "avg")
    elif (
        (order, dim) == ("rank", 0)
        and _is_plain(sizes, wire, feedback)
        and is_fast(_FOLD_KEYS.get(op, ""), x, group)
        and x.shape[0] % group.size == 0
    ):
        fold = StartedFold(x, group, mean=op == "avg", async_op=async_op)
        if async_op:
            return cast(Tensor, Pending("reduce_scatter", fold, identity))
        return fold.finish()
    return _reduce_scatter(x, group, dim, sizes, op, order, wire, feedback, async_op)


def _is_plain(sizes: object, wire: object, feedback: object) -> bool:
    return sizes is None and wire is None and feedback is None


def _reduce_scatter(
    x: Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None,
    op: str,
    order: str,
    wire: str | None,
    feedback: Feedback | None = None,
    async_op: bool = False,
) -> Tensor:
    collective = plan_reduce_scatter(x, group, dim, sizes, op, order, wire, feedback)
    if group.size == 1:
        # Copied: with one member, too, the result is never the caller's memory.
        return cast(Tensor, ready("reduce_scatter", copy(x), async_op))
    # Only what the backend reduces as it is: encoded or folded elements need more than one step.
    if op in _FAST_KEYS and reduction(op, x.dtype, group.backends[x.device.type]).plain:
        note_checked(_FAST_KEYS[op], x, group)
    if op in _FOLD_KEYS and order == "rank" and x.dtype in _FOLDED:
        note_checked(_FOLD_KEYS[op], x, group)
    return cast(Tensor, run_or_start("reduce_scatter", collective, x, async_op))


register(
    "reduce_scatter(Tensor x, str group, int dim, SymInt[]? sizes, str op, str order, str? wire)"
    " -> Tensor",
    _reduce_scatter,
)


def plan_reduce_scatter(
    x: Tensor,
    group: Group,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    order: str = "native",
    wire: str | None = None,
    feedback: Feedback | None = None,
) -> Linear:
    """Check the arguments of `reduce_scatter`."""
    check_tensor("reduce_scatter", x, group)
    # For its errors only: a wrong op or order is named before wrong sizes are.
    reduction(op, x.dtype, group.backends[x.device.type], order)
    dim = check_dim("reduce_scatter", dim, tuple(x.shape))
    cut = chunk_sizes("reduce_scatter", x.shape[dim], dim, sizes, group)
    if check_wire("reduce_scatter", wire, op, x, feedback) is not None:
        return CompressedReduceScatter(group, dim, cut, op, order, cast(str, wire), feedback)
    return LinearReduceScatter(group, dim, cut, op, order)
