"""Basic indexing: slices, integers, `None` and `...`, of sharded dims too.

A slice of a sharded dim stays on its ranks, as an uneven shard; what an integer selects stays with
its owner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._ops.index.gather import lookup_strategy, spread_out
from vescale_dtensor._ops.index.masked_select import masked
from vescale_dtensor._ops.view.slice_propagation import (
    DimSlice,
    SliceResult,
    slice_result,
    slices_sharded_dim,
)
from vescale_dtensor._ops.view.slice_strategy import indexed, slice_strategy
from vescale_dtensor._planning import OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


def _getitem(call: OpCall) -> Strategy | None:
    given = call.args[1]
    items = list(given) if isinstance(given, tuple) else [given]
    shape = tuple(call.args[0].shape)
    # Tensors and lists pick elements, and masks select them by value: other strategies.
    if any(not basic(item) for item in items) or len(call.operands) != 1:
        if len(items) == 1 and len(call.operands) == 2 and call.operands[1].dtype is torch.bool:
            return masked(call) if call.operands[0] is call.args[0] else None
        return lookup_strategy(call, items, shape)
    spread = spread_out(items, len(shape))
    parts = None if spread is None else parts_of(spread, shape)
    if spread is None or parts is None:
        return None  # too many indices, or one out of range: the fallback raises torch's error
    sliced = _with_new_dims(spread, parts)
    operand = call.operands[0]
    if not (
        isinstance(operand, DTensor) and slices_sharded_dim(operand._spec.layout, shape, sliced)
    ):
        return _letters(spread, parts, shape)
    return slice_strategy(
        call,
        operand._spec.layout,
        [sliced],
        lambda x, index, _: indexed(x, _in_place(spread, index)),
        many=False,
    )


def basic(item: Any) -> bool:
    """Whether an item of an index is a number, a slice, an ellipsis or a new dim."""
    # To Python a bool is an int; to torch it is a mask without dims.
    if isinstance(item, bool):
        return False
    if isinstance(item, slice):
        # A bound that is a tensor is a value, which a plan must not depend on.
        return all(v is None or isinstance(v, int) for v in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or isinstance(item, int)


def parts_of(spread: list[Any], shape: tuple[int, ...]) -> list[DimSlice] | None:
    """What is selected of each dim; None where torch has to say what is wrong."""
    parts = []
    for item, extent in zip((i for i in spread if i is not None), shape, strict=True):
        if isinstance(item, int):
            if not -extent <= item < extent:
                return None
            # Negative ones resolved here: on a shard they would count from the shard's end.
            parts.append(DimSlice(item % extent, 1, keeps_dim=False))
            continue
        if item.step is not None and item.step < 1:
            return None
        # Python's own clamping, in numbers of the global extent.
        start, stop, step = item.indices(extent)
        parts.append(DimSlice(start, max(0, -(-(stop - start) // step)), step))
    # Empty slices are all alike, wherever they start.
    return [DimSlice(0, 0) if p.keeps_dim and p.length == 0 else p for p in parts]


def _with_new_dims(spread: list[Any], parts: list[DimSlice]) -> SliceResult:
    # Per dim of the operand its place in the result; new dims belong to none.
    places: list[int | None] = []
    shape: list[int] = []
    for item in spread:
        if item is None:
            shape.append(1)
            continue
        part = parts[len(places)]
        places.append(len(shape) if part.keeps_dim else None)
        if part.keeps_dim:
            shape.append(part.length)
    return SliceResult(tuple(parts), tuple(places), tuple(shape))


def _in_place(spread: list[Any], index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The local index, with `None` where the global one has it."""
    feed = iter(index)
    return tuple(None if item is None else next(feed) for item in spread)


def _letters(items: list[Any], parts: list[DimSlice], shape: tuple[int, ...]) -> Strategy:
    """The strategy where all of each sharded dim is selected: torch's own call on local tensors."""
    operand: list[int | None] = []
    result: list[int | None] = []
    for item in items:
        if item is None:
            result.append(None)
            continue
        dim = len(operand)
        # `x[0:n]` of extent n is everything, on a local tensor, too.
        letter = dim if parts[dim].covers(shape[dim]) else None
        operand.append(letter)
        if not isinstance(item, int):
            result.append(letter)
    return Signature((tuple(operand),), (tuple(result),), preserves_partial=True).strategy()


def _one_dim(call: OpCall, part: DimSlice | None, dim: Any) -> Strategy | None:
    operand = call.operands[0]
    if part is None:
        return None
    shape = tuple(operand.shape)
    parts = [DimSlice(0, n) for n in shape]
    parts[dim] = part
    sliced = slice_result(parts)
    if not (
        isinstance(operand, DTensor) and slices_sharded_dim(operand._spec.layout, shape, sliced)
    ):
        # All shards of other dims stay; the dim itself is not sharded, or all of it is selected.
        dims = letters(len(shape), {dim})
        result = dims if part.keeps_dim else tuple(d for i, d in enumerate(dims) if i != dim)
        return Signature((dims,), (result,), preserves_partial=True).strategy()
    return slice_strategy(call, operand._spec.layout, [sliced], indexed, many=False)


def _select(call: OpCall) -> Strategy | None:
    dim, index = call.dim(1), call.argument(2, "index")
    if dim is None or len(call.operands) != 1 or not isinstance(index, int):
        return None
    extent = call.operands[0].shape[dim]
    inside = -extent <= index < extent
    return _one_dim(call, DimSlice(index % extent, 1, keeps_dim=False) if inside else None, dim)


def _narrow(call: OpCall) -> Strategy | None:
    start, length = call.argument(2, "start"), call.argument(3, "length")
    dim, operands = call.dim(1), 1 + isinstance(start, Tensor)
    if dim is None or len(call.operands) != operands or not isinstance(length, int):
        return None
    if isinstance(start, Tensor):
        # The value of a tensor is not known when the call is planned: that dim is not sharded.
        kept = letters(call.operands[0].ndim, {dim})
        return Signature((kept, no_letters(start)), (kept,)).strategy()
    if not isinstance(start, int):
        return None
    extent = call.operands[0].shape[dim]
    # One behind the last index is a start too, of no elements.
    if not -extent <= start <= extent or length < 0:
        return None
    start = start + extent if start < 0 else start
    return _one_dim(call, DimSlice(start, length) if start + length <= extent else None, dim)


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("__getitem__", Rule("index", _getitem, _READS, views=True)),
    **entries("select", Rule("select", _select, _READS, views=True)),
    **entries("narrow", Rule("narrow", _narrow, _READS, views=True)),
}
