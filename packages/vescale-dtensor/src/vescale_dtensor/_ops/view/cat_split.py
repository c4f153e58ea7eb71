"""Joining and splitting: `cat`, `stack`, `split`, `chunk`, `unbind`.

Operands of a join may be sharded along the other dims; the operand of a split along any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.view.slice_propagation import DimSlice, slice_result
from vescale_dtensor._ops.view.slice_strategy import indexed, slice_strategy
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim
from vescale_dtensor._tensor.dtensor import DTensor


def _cat(call: OpCall) -> Strategy | None:
    ndim = max(operand.ndim for operand in call.operands)
    joined = wrap_dim(call.argument(1, "dim", 0), ndim)
    # Torch joins an empty 1-D tensor with anything: caches of keys and values begin as one.
    nothing = [tuple(operand.shape) == (0,) for operand in call.operands]
    pairs = zip(call.operands, nothing, strict=True)
    if joined is None or any(operand.ndim != ndim and not empty for operand, empty in pairs):
        return None
    # Joined shard by shard, the operands would take turns along the dim instead of following on;
    # but one alone, as the first keys that a cache is given, stays as it lies.
    alone = len(nothing) - sum(nothing) == 1
    dims = letters(ndim, set() if alone else {joined})
    inputs = tuple((None,) if empty else dims for empty in nothing)
    return Signature(inputs, (dims,), preserves_partial=True).strategy()


def _stack(call: OpCall) -> Strategy | None:
    ndim = call.operands[0].ndim
    at = wrap_dim(call.argument(1, "dim", 0), ndim + 1)
    if at is None:
        return None
    dims = letters(ndim)
    result: Dims = (*dims[:at], None, *dims[at:])
    return Signature((dims,) * len(call.operands), (result,), preserves_partial=True).strategy()


def _split_strategy(call: OpCall, dim: int | None, keeps: bool) -> Strategy | None:
    """The strategy of a split along a dim, which the results keep or lack."""
    operand = call.operands[0]
    if dim is None or len(call.operands) != 1:
        return None
    # Only here do the placements of the results depend on extents; else one letter per dim says
    # all.
    if isinstance(operand, DTensor) and _is_sharded(operand._spec.layout, dim):
        return _split_sharded(call, operand._spec.layout, dim, keeps)
    dims = letters(operand.ndim, {dim})
    result = dims if keeps else tuple(d for i, d in enumerate(dims) if i != dim)
    order = order_of_operand(call)
    if order is not None and not keeps:
        # The dims behind the one that is dropped move up by one.
        order = tuple(d - (d > dim) for d in order if d != dim)
    return Signature((dims,), (result,), preserves_partial=True, output_orders=(order,)).strategy()


def _is_sharded(layout: Layout, dim: int) -> bool:
    return any(isinstance(p, Sharded) and dim in p.cut_dims() for p in layout.placements)


def _split_sharded(call: OpCall, layout: Layout, dim: int, keeps: bool) -> Strategy | None:
    """Split a sharded dim: each rank keeps its part of every result. Nothing is sent."""
    # Torch splits a tensor without data: sizes, errors and deprecated forms are its own.
    shape = tuple(call.operands[0].shape)
    stand_in = torch.empty(shape, device="meta")
    try:
        # Views share its storage, so that their offsets tell where each part begins.
        views = call.func(stand_in, *call.args[1:], **call.kwargs)
    except (RuntimeError, IndexError, TypeError):
        return None  # the fallback raises torch's error on every rank
    full = [DimSlice(0, n) for n in shape]
    slices = []
    for view in views:
        start = view.storage_offset() // stand_in.stride(dim)
        count = view.shape[dim] if keeps else 1
        # An empty result has no defined offset.
        part = DimSlice(start if count else 0, count, keeps_dim=keeps)
        slices.append(slice_result([*full[:dim], part, *full[dim + 1 :]]))
    return slice_strategy(call, layout, slices, indexed, many=True) if slices else None


def _split(call: OpCall) -> Strategy | None:
    if len(call.operands) == 2:
        return _split_where(call)
    return _split_strategy(call, call.dim(2, 0), keeps=True)


def _split_where(call: OpCall) -> Strategy | None:
    """`tensor_split(input, places, dim)` at places in a tensor: that dim is not sharded."""
    (x, places), dim = call.operands, call.dim(2, 0)
    if dim is None or call.operands[0] is not call.args[0]:
        return None
    dims = letters(x.ndim, {dim})
    return Signature(
        (dims, no_letters(places)),
        (dims,),
        local=_call_local,
        output_orders=(order_of_operand(call),),
        data_dependent_shape=True,
    ).strategy()


def _call_local(context: LocalContext, args: Any, kwargs: Any) -> Any:
    return context.call.func(*args, **kwargs)


def _split_along(*dims: int) -> Callable[[OpCall], Strategy | None]:
    """`hsplit` and its kin: `dims[n - 1]` of a tensor with n dims, the last entry for more."""

    def strategy(call: OpCall) -> Strategy | None:
        ndim = call.operands[0].ndim
        dim = dims[min(ndim, len(dims)) - 1] if ndim else None
        return _split_strategy(call, wrap_dim(dim, ndim), keeps=True)

    return strategy


def _unbind(call: OpCall) -> Strategy | None:
    return _split_strategy(call, call.dim(1, 0), keeps=False)


_READS = Reads.NUMBERS | Reads.BROADCAST_PATTERN
_BY_SHAPE = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("cat concat concatenate", Rule("cat", _cat, _READS)),
    **entries("stack", Rule("stack", _stack, _READS)),
    **entries(
        "split chunk split_with_sizes tensor_split unsafe_chunk unsafe_split",
        Rule("split", _split, _BY_SHAPE, views=True),
    ),
    **entries("unbind", Rule("unbind", _unbind, _BY_SHAPE, views=True)),
    **entries("hsplit", Rule("split", _split_along(0, 1), _BY_SHAPE, views=True)),
    **entries("vsplit", Rule("split", _split_along(0), _BY_SHAPE, views=True)),
    **entries("dsplit", Rule("split", _split_along(2), _BY_SHAPE, views=True)),
}
