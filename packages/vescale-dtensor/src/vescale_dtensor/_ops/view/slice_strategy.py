"""The strategy of operations that select parts of one tensor: slices, integers, splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Partial, Replicate
from vescale_dtensor._layout.shard_geometry import dim_groups
from vescale_dtensor._ops.view.slice_propagation import (
    DimSlice,
    SliceResult,
    local_slice,
    slice_placements,
)
from vescale_dtensor._planning import AxisStrategy, LocalContext, OpCall, Strategy

Pick = Callable[[Tensor, tuple[Any, ...], int], Tensor]
"""Takes from a local tensor, given an index (a slice or a number) per dim, the i-th result."""

INSIDE = object()
"""The index of a dim that the local tensor lacks: it is part of the one before."""


def indexed(x: Tensor, index: Sequence[Any], _: int = 0) -> Tensor:
    """`x[index]`, for a local tensor."""
    return x[tuple(item for item in index if item is not INSIDE)]


# Torch splits so one view at a time, and permits recorded writes to each.
_SEPARATE = ("unsafe_", "tensor_split", "hsplit", "vsplit", "dsplit")


def slice_strategy(
    call: OpCall, layout: Layout, results: Sequence[SliceResult], pick: Pick, *, many: bool
) -> Strategy:
    """The strategy: shards that can stay do, others are gathered.

    Args:
        call: with one operand, of which parts are selected.
        layout: of the operand.
        results: what is selected, per output.
        pick: takes it from a local tensor, given the local index.
        many: whether a tuple is returned.
    """
    shape = tuple(call.operands[0].shape)
    separate = call.func.__name__.startswith(_SEPARATE)
    # For all mesh axes at once: whether an inner shard stays depends on what the outer ones leave.
    passed = slice_placements(layout, shape, results)
    replicated = AxisStrategy((Replicate(),), (Replicate(),) * len(results))
    rows = tuple(
        (AxisStrategy((before,), after, fixed_placement=True),)
        if after and after[0] != Replicate()
        else ()
        for before, after in zip(layout.placements, passed, strict=True)
    )
    # A partial result is zeros on ranks other than the owner: it cannot alias the operand.
    copied = any(
        isinstance(before, Sharded) and any(isinstance(p, Partial) for p in after)
        for before, after in zip(layout.placements, passed, strict=True)
    )

    def local(context: LocalContext, args: Any, kwargs: Any) -> Any:
        found = [_one(context, args[0], shape, result, i, pick) for i, result in enumerate(results)]
        if not many:
            return found[0]
        # Also where autograd asks: it refuses a recorded write to one of several views.
        recorded = args[0].requires_grad and torch.is_grad_enabled() and not separate
        return tuple([each[None].unbind()[0] for each in found] if recorded else found)

    shapes = tuple(result.shape for result in results)
    return Strategy(
        (replicated,), axis_candidates=rows, shapes=shapes, local=local, copy_on_shards=copied
    )


def _one(
    context: LocalContext, x: Tensor, shape: Shape, result: SliceResult, number: int, pick: Pick
) -> Tensor:
    layout = context.input_layout(0)
    sharded = {d for p in layout.placements if isinstance(p, Sharded) for d in p.cut_dims()}
    index: list[Any] = []
    missing = False
    # Dims that a flat shard shards together are one dim of the local tensor.
    inside = {d for group in dim_groups(layout.placements, len(shape)) for d in group[1:]}
    for dim, part in enumerate(result.parts):
        if dim in inside:
            index.append(INSIDE)
        elif part.covers(shape[dim]):
            index.append(slice(None))
        elif dim not in sharded:
            index.append(_plain(part))
        else:
            local = local_slice(layout, shape, dim, part)
            # An integer that another rank owns; an empty slice is no such case.
            missing = missing or (not part.keeps_dim and local.start == local.stop)
            index.append(local if part.keeps_dim else local.start)
    if not missing:
        return pick(x, tuple(index), number)
    # Another rank owns the index. The result is still computed from x, of which it takes nothing,
    # so that backward runs, and communicates, on every rank.
    nothing = x[(slice(0, 0),) * x.ndim]
    local_shape = context.local_output_shape(number)
    return nothing.view(local_shape) if 0 in local_shape else _zeros(nothing, local_shape)


def _plain(part: DimSlice) -> Any:
    end = part.start + part.length * part.step
    return slice(part.start, end, part.step) if part.keeps_dim else part.start


def _zeros(nothing: Tensor, shape: Shape) -> Tensor:
    return torch.constant_pad_nd(nothing.view(0), (0, 1)).view(()).expand(shape).contiguous()
