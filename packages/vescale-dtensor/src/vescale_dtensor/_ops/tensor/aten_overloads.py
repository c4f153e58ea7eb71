"""Operators of `torch.ops.aten` that programs call by name, and functions of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.decompositions.tensor import handled_as
from vescale_dtensor._planning import Dims, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim


def _slice(
    input: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    before = wrap_dim(dim, input.ndim)
    if before is None:
        return NotImplemented
    return input[(slice(None),) * before + (slice(start, end, step),)]


def _dropped(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * (mask.to(grad_output.dtype) * scale)


def _safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros instead of NaN where there is nothing but minus infinity."""
    nothing = (input.detach() == -torch.inf).all(dim, keepdim=True)
    found = torch.softmax(input.masked_fill(nothing, 0), dim, dtype=dtype)
    return found.masked_fill(nothing, 0)


def _softmax_slope(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    weighted = grad_output * output
    slope = weighted - output * weighted.sum(dim, keepdim=True)
    return slope.to(input_dtype).contiguous()


def _resized(call: OpCall) -> Strategy | None:
    """`_upsample_bilinear2d_aa`: batch and channels may be sharded."""
    if len(call.operands) != 1 or call.operands[0].ndim != 4:
        return None
    dims: tuple[Dims, ...] = (("n", "c", None, None),)
    return pads_empty(Signature(dims, dims, linear=((0,),))).strategy()


def _of_numbers(call: OpCall) -> None:
    """`linspace` and `logspace` of tensors without dims: they run replicated, without a note."""


_aten = torch.ops.aten
_STEPS: dict[Any, Callable[..., Any]] = {
    _aten.slice: _slice,
    _aten.slice.Tensor: _slice,
    _aten.native_dropout_backward: _dropped,
    _aten.native_dropout_backward.default: _dropped,
    _aten._safe_softmax: _safe_softmax,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._softmax_backward_data: _softmax_slope,
    _aten._softmax_backward_data.default: _softmax_slope,
}
HANDLERS: dict[Any, Callable[..., Any]] = handled_as(_STEPS)
"""Functions this module answers for."""

_UPSAMPLE = Rule("resizing", _resized, Reads.NUMBERS | Reads.BROADCAST_PATTERN)
RULES: dict[Any, Rule] = {
    _aten._upsample_bilinear2d_aa: _UPSAMPLE,
    _aten._upsample_bilinear2d_aa.default: _UPSAMPLE,
    **entries("linspace logspace", Rule("numbers", _of_numbers), (torch,)),
}
