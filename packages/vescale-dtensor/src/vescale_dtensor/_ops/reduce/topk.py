"""`topk` along a sharded dim: the top k of every shard are gathered, then the top k of those.

Every rank sends `k` values and indices per row instead of its part of the row, unless that is less.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import drop_letter, letters
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    extreme_identity,
    pad_dim,
    pad_empty_dims,
    sharded_dim_strategy,
    sharding_axes,
    with_sharded_kernel,
)
from vescale_dtensor._ops.common.unsharded_dims import unsharded_dims_strategy
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


def _topk(call: OpCall) -> Strategy | None:
    """`topk(x, k, dim, largest, sorted)`."""
    operand = call.operands[0]
    count, sorted_dim = call.argument(1, "k"), call.dim(2, -1)
    if type(count) is not int or sorted_dim is None or len(call.operands) != 1:
        return None
    if not 0 < count <= operand.shape[sorted_dim]:
        return None
    largest = bool(call.argument(3, "largest", True))
    dims = letters(operand.ndim)
    result: Dims = drop_letter(dims, sorted_dim)

    def kernel(context: LocalContext, args: Any, kwargs: Any) -> Any:
        return _of_all(context, args[0], count, sorted_dim, largest)

    if operand.shape[sorted_dim] <= _SENT * count * _shard_count(operand, sorted_dim):
        # Unsharding sends less, and torch itself breaks ties, which are common among few experts.
        return unsharded_dims_strategy(call, sorted_dim, ("same", "same"))
    partial = (call.differentiable, False)
    strategy = sharded_dim_strategy(dims, (result, result), (sorted_dim,), partial)
    return with_sharded_kernel(strategy, (sorted_dim,), kernel)


# For each of the top k a value and an index of 8 bytes are sent: as much as 3 values of 4 bytes.
_SENT = 3


def _shard_count(operand: Tensor, dim: int) -> int:
    """Over how many coordinates a dim is sharded."""
    if not isinstance(operand, DTensor):
        return 1
    layout = operand._spec.layout
    return prod(layout.sizes[axis] for axis in sharding_axes(layout, (dim,)))


def _of_all(context: LocalContext, x: Tensor, count: int, dim: int, largest: bool) -> Any:
    sharded, extent = ShardedDims(context, (dim,)), context.call.operands[0].shape[dim]
    begin = sharded.offsets[dim]
    with torch.no_grad():
        # Each of the global top k is among the top k of its own shard; a shard may have fewer.
        values, indices = x.topk(min(count, x.shape[dim]), dim, largest)
        missing = count - values.shape[dim]
        identity = extreme_identity(x.dtype, largest=largest)
        values = pad_dim(values, dim, missing, identity)
        indices = pad_dim(indices + begin, dim, missing, extent)
        values, indices = (
            sharded.gather(part).movedim(0, dim).flatten(dim, dim + 1) for part in (values, indices)
        )
        # Shards shorter than k were padded. Padding is sorted behind real elements, and then all
        # stably by value: padding loses ties, and real elements keep the tensor's order.
        real = torch.argsort((indices == extent).to(torch.int8), dim=dim, stable=True)
        values, indices = values.gather(dim, real), indices.gather(dim, real)
        order = torch.argsort(values, dim=dim, descending=largest, stable=True)
        order = order.narrow(dim, 0, count)
        values, indices = values.gather(dim, order), indices.gather(dim, order)
    kind = torch.return_types.topk
    if not context.call.differentiable:
        return kind((values, indices))
    # A partial sum: each rank contributes the chosen elements that it owns, with their gradient.
    mine = (indices >= begin) & (indices < begin + x.shape[dim])
    own = pad_empty_dims(x, (dim,), 0).gather(dim, torch.where(mine, indices - begin, 0))
    return kind((torch.where(mine, own, 0), indices))


RULES = entries("topk", Rule("topk", _topk, Reads.NUMBERS | Reads.SHAPES))
