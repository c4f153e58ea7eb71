"""The derivative of a norm over several ranks, in terms of the norm of the whole.

Each rank's own norm has none where its part is zero or empty, although the whole may have one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._ops.common.sharded_dim import restore_dims, sum_over_axes
from vescale_dtensor._torch.overridable import overridable


class _WholeNorm(torch.autograd.Function):
    """Its output is saved, and not its input `norm`: so that backward can be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        order: float,
        dims: tuple[int, ...],
        keepdim: bool,
        layout: Layout,
        axes: tuple[int, ...],
    ) -> Tensor:
        result = norm.clone()
        ctx.save_for_backward(x, result)
        ctx.order, ctx.dims = order, () if keepdim else dims
        ctx.layout, ctx.axes = layout, axes
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, norm = ctx.saved_tensors
        found = None
        if ctx.order:  # a count has no derivative
            # Each rank has a cotangent of its own copy.
            total = sum_over_axes(cotangent, ctx.layout, ctx.axes)
            found = _gradient(
                x, restore_dims(norm, ctx.dims), restore_dims(total, ctx.dims), ctx.order
            )
        return found, *(None,) * 6


def _gradient(x: Tensor, norm: Tensor, cotangent: Tensor, order: float) -> Tensor:
    """As `norm_backward` of torch (FunctionsManual.cpp) has it, zeros and infinities included."""
    if order == 1:
        return x.sgn() * cotangent
    if order == 2:
        return cotangent * (x / norm).masked_fill(norm == 0, 0)
    if order < 1:
        powers = x.sgn() * x.abs().pow(order - 1).masked_fill(x == 0, 0)
        return powers * cotangent * norm.pow(1 - order)
    powers = x.sgn() * x.abs().pow(order - 1) if order < 2 else x * x.abs().pow(order - 2)
    return powers * (cotangent / norm.pow(order - 1)).masked_fill(norm == 0, 0)


@overridable
def whole_norm(
    x: Tensor,
    norm: Tensor,
    order: float,
    dims: tuple[int, ...],
    keepdim: bool,
    layout: Layout,
    axes: tuple[int, ...],
) -> Tensor:
    """The norm over these axes, which every rank has, as a function of this rank's part.

    Args:
        x: this rank's part; it may be empty.
        norm: the norm of all parts.
        order: as of `torch.linalg.vector_norm`, and finite.
        dims: that are reduced.
        keepdim: whether the norm has them.
        layout: of the tensor.
        axes: those that shard these dims.
    """
    how = (order, dims, keepdim, layout, axes)
    result: Tensor = _WholeNorm.apply(x, norm, *how)  # type: ignore[no-untyped-call]
    return result
