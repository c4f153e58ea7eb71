"""`unique` and `unique_consecutive`: the distinct values of every rank's shard are all-gathered.

The distinct values among those are the distinct values of the global tensor. The inverse is sharded
as the elements are: each rank knows the places of its values among the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vescale_comm import all_gather

from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    is_refused,
    sharded_dim_strategy,
    with_sharded_kernel,
)
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Strategy
from vescale_dtensor._planning.op_call import wrap_dim


@dataclass(frozen=True)
class _UniqueRequest:
    """What a call asks for: of all elements, or of the slices along `dim`."""

    find: Callable[..., Any]
    inverse: bool
    counts: bool
    dim: int | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What differs, the inverse, and the counts, of a tensor here."""
        found: tuple[Tensor, Tensor, Tensor] = self.find(
            x, return_inverse=True, return_counts=True, dim=self.dim
        )
        return found


def _unique(call: OpCall) -> Strategy | None:
    """`unique(input, sorted, return_inverse, return_counts, dim)`: always sorted."""
    return _strategy(call, torch.unique, 2)


def _consecutive(call: OpCall) -> Strategy | None:
    """`unique_consecutive(input, return_inverse, return_counts, dim)`."""
    return _strategy(call, torch.unique_consecutive, 1)


def _strategy(call: OpCall, find: Callable[..., Any], position: int) -> Strategy | None:
    shape = tuple(call.operands[0].shape)
    given = [
        call.argument(position + i, name)
        for i, name in enumerate(("return_inverse", "return_counts", "dim"))
    ]
    unique_dim = wrap_dim(given[2], len(shape))
    if not shape or is_refused(call) or (given[2] is not None and unique_dim is None):
        return None
    if unique_dim is not None and 0 in shape:
        return None  # torch refuses some empty shapes and not others
    request = _UniqueRequest(find, bool(given[0]), bool(given[1]), unique_dim)
    operand = letters(len(shape))
    values: Dims = (None,) if unique_dim is None else (None,) * len(shape)
    inverse: Dims = operand if unique_dim is None else (unique_dim,)
    outputs = [values, *[inverse] * request.inverse, *[(None,)] * request.counts]
    # `unique_consecutive` of a flattened tensor compares neighbours: only shards of the first dim
    # follow each other in that order.
    looked: Sequence[int] = (
        (unique_dim,) if unique_dim is not None else range(len(shape)) if position == 2 else (0,)
    )
    shardable = tuple(d if d in looked else None for d in operand)
    kept = [tuple(d if d in looked else None for d in dims) for dims in outputs]
    found = sharded_dim_strategy(shardable, kept, looked, (False,) * len(outputs))

    def kernel(context: LocalContext, args: Any, kwargs: Any) -> Any:
        return _of_all(context, args[0], looked, request)

    # Torch moves the dim to the front to compare slices, and the result keeps that memory order.
    order = (unique_dim, *(d for d in range(len(shape)) if d != unique_dim)) if unique_dim else None
    orders = (order, *[None] * (len(outputs) - 1))
    found = with_sharded_kernel(found, looked, kernel)
    return replace(found, output_orders=orders, data_dependent_shape=True)


def _of_all(
    context: LocalContext, x: Tensor, looked: Sequence[int], request: _UniqueRequest
) -> Any:
    sharded, dim = ShardedDims(context, looked), request.dim or 0
    # Only this local step differs where the shard is empty: all ranks call the gathers below.
    if x.numel():
        own, within, often = request(x)
    else:
        own = x if request.dim is not None else x.reshape(-1)
        often = torch.zeros(0, dtype=torch.int64, device=x.device)
        within = often if request.dim is not None else torch.zeros_like(x, dtype=torch.int64)
    # First how many each rank found: the gather of uneven shards needs all sizes on every rank.
    sizes = sharded.gather_sizes(own.shape[dim], x)
    # Distinct values of distinct values; `where` says where each rank's values are among them.
    values, where, _ = request(all_gather(own, sharded.group, dim=dim, sizes=sizes))
    if not (request.inverse or request.counts):
        return values
    results = [values]
    if request.inverse:
        # This rank's values stand behind those of the ranks before it.
        begin = sum(sizes[: sharded.rank])
        results.append(where[begin + within])
    if request.counts:
        each = all_gather(often, sharded.group, sizes=sizes)
        # A value that several ranks hold occurs once for each in `where`: its counts add up.
        total = torch.zeros(values.shape[dim], dtype=torch.int64, device=x.device)
        results.append(total.index_add(0, where, each))
    return tuple(results)


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("unique", Rule("unique", _unique, _READS)),
    **entries("unique_consecutive", Rule("unique", _consecutive, _READS)),
}
