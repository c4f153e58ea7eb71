"""Selection by value, with data-dependent shapes: `x[mask]`, `nonzero`.

The output length depends on all ranks' masks, so the indices of selected elements are all-gathered;
values are not: of `x[mask]` each rank keeps its own elements, at their places, in a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from vescale_comm import all_gather
from vescale_comm.nested import tensors_within

from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    local_offsets,
    sharded_dim_strategy,
    with_sharded_kernel,
)
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy


def masked(call: OpCall) -> Strategy | None:
    """`x[mask]`: the mask has the first dims of `x`, or all of them."""
    x, mask = call.operands
    if not mask.ndim or mask.dtype is not torch.bool or mask.shape != x.shape[: mask.ndim]:
        return None
    dims = letters(x.ndim)
    asked = dims[: mask.ndim]
    found = Signature(
        (dims, asked),
        ((None, *dims[mask.ndim :]),),
        dict.fromkeys(asked, "sum"),
        linear=((0,),),
        contiguous_only=frozenset(asked),
        data_dependent_shape=True,
        # The result's memory order follows from the operand's. Meta tensors do not tell: its shape
        # depends on values.
        probe_order="real" if order_of_operand(call) else None,
    ).strategy()
    return with_sharded_kernel(found, range(mask.ndim), _sharded_masked)


def _sharded_masked(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    x, mask = tensors_within(args)
    # Numbers are distinct, so sorting them gives the order of one device.
    own = _numbered(context, mask)
    known = _of_all(own, ShardedDims(context, range(mask.ndim))).sort().values
    # Each rank writes its elements where the global order has them, and zeros elsewhere.
    nothing = x.new_zeros(len(known), *x.shape[mask.ndim :])
    return nothing.index_copy(0, torch.searchsorted(known, own), x[mask])


def _numbered(context: LocalContext, mask: Tensor) -> Tensor:
    """The row-major numbers, in the global mask, of this rank's true elements."""
    shape = context.call.operands[0].shape
    number = mask.new_zeros((), dtype=torch.int64)
    places = mask.nonzero(as_tuple=True)
    # Row-major, dim by dim; the mask may have fewer dims than the operand.
    for place, begin, extent in zip(places, local_offsets(context), shape, strict=False):
        number = number * extent + place + begin
    return number


def _of_all(x: Tensor, sharded: ShardedDims) -> Tensor:
    """All ranks' vectors, whose lengths differ, one after the other."""
    return all_gather(x, sharded.group, sizes=sharded.gather_sizes(len(x), x))


def _nonzero(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    if not ndim or len(call.operands) != 1:
        return None
    dims = letters(ndim)
    apart = bool(call.argument(1, "as_tuple", False))
    outputs: Sequence[Dims] = ((None,),) * ndim if apart else ((None, None),)
    found = sharded_dim_strategy(dims, outputs, range(ndim), (False,) * len(outputs))
    order: Literal["real"] | None = None if apart else "real"
    found = with_sharded_kernel(found, range(ndim), _sharded_nonzero)
    return replace(found, probe_order=order, data_dependent_shape=True)


def _sharded_nonzero(context: LocalContext, args: Any, kwargs: Any) -> Any:
    x: Tensor = args[0]
    sharded = ShardedDims(context, range(x.ndim))
    # The result is the indices themselves, so every rank has all of them: it is replicated.
    numbers = _of_all(_numbered(context, x != 0), sharded).sort().values
    places = torch.unravel_index(numbers, context.call.operands[0].shape)
    return places if context.call.argument(1, "as_tuple", False) else torch.stack(places).t()


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("nonzero argwhere", Rule("selected", _nonzero, _READS)),
}
