"""Pooling and other operations on images: the batch and the channels may be sharded.

Image dims may not; where an operation mixes channels, only the batch may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.memory_formats import in_format_of_operand
from vescale_dtensor._planning import Dims, OpCall, Rule, Signature, Strategy

_PLACES = (torch, F)


def _pooling(
    spatial: int, outputs: int = 1, linear: bool = False, flag: int | None = None
) -> Callable[[OpCall], Strategy | None]:
    """`flag`: position of an argument `return_indices`, which asks for a second output."""

    def strategy(call: OpCall) -> Strategy | None:
        ndim = call.operands[0].ndim
        if len(call.operands) != 1 or ndim not in (spatial + 1, spatial + 2):
            return None
        # Indices count within one channel's image, which is on one rank: local ones are global.
        if flag is not None and call.argument(flag, "return_indices", False):
            return _mapped(call, (*range(ndim - spatial), *(None,) * spatial), 2)
        return _mapped(call, (*range(ndim - spatial), *(None,) * spatial), outputs, linear)

    return strategy


def _mapped(call: OpCall, dims: Dims, outputs: int = 1, linear: bool = False) -> Strategy:
    inputs = (dims,) * len(call.operands)
    results = (dims,) * outputs
    linear = linear and call.operands[0].dtype.is_floating_point  # averages of integers are rounded
    # Kernels that refuse empty images would raise on some ranks only.
    return pads_empty(Signature(inputs, results, linear=((0,),) if linear else ())).strategy()


def _unpooling(spatial: int) -> Callable[[OpCall], Strategy | None]:
    """`max_unpool`: values and where they came from."""

    def strategy(call: OpCall) -> Strategy | None:
        ndim = call.operands[0].ndim
        if len(call.operands) != 2 or ndim not in (spatial + 1, spatial + 2):
            return None
        found = _mapped(call, (*range(ndim - spatial), *(None,) * spatial))
        return in_format_of_operand(call, found) if spatial == 2 else found

    return strategy


def _resized(call: OpCall) -> Strategy | None:
    """`interpolate`: a linear map of each channel's image, whatever the mode."""
    ndim = call.operands[0].ndim
    if len(call.operands) != 1 or ndim not in (3, 4, 5):
        return None
    # Image dims are not sharded: a point is interpolated between neighbours.
    return _mapped(call, (0, 1, *(None,) * (ndim - 2)), linear=True)


def _shuffled(call: OpCall) -> Strategy | None:
    """`pixel_shuffle` and its inverse, which move elements between channels and image."""
    ndim = call.operands[0].ndim
    if len(call.operands) != 1 or ndim < 3:
        return None
    return _mapped(call, (*range(ndim - 3), None, None, None), linear=True)


def _batch_only(call: OpCall) -> Strategy | None:
    """`unfold`, `fold`, `channel_shuffle`: linear; all but the batch is mixed."""
    ndim = call.operands[0].ndim
    if len(call.operands) != 1 or ndim < 3:
        return None
    name = call.func.__name__
    if (name == "unfold" and ndim != 4) or (name == "fold" and ndim != 3):
        return None
    kept = {"unfold": 3, "fold": 4}.get(name, ndim)
    inputs: tuple[Dims, ...] = ((0, *(None,) * (ndim - 1)),)
    results: tuple[Dims, ...] = ((0, *(None,) * (kept - 1)),)
    found = pads_empty(Signature(inputs, results, linear=((0,),))).strategy()
    return in_format_of_operand(call, found) if name.endswith("channel_shuffle") else found


def _sampled(call: OpCall) -> Strategy | None:
    """`grid_sample`: channels of an image, all at the same places."""
    if len(call.operands) != 2 or call.operands[0].ndim not in (4, 5):
        return None
    image: Dims = (None,) * (call.operands[0].ndim - 2)
    inputs: tuple[Dims, ...] = (("n", "c", *image), ("n", *image, None))
    results: tuple[Dims, ...] = (("n", "c", *image),)
    return pads_empty(Signature(inputs, results, linear=((0,),))).strategy()


def _pooling_rules(k: int) -> dict[Any, Rule]:
    """Of images of `k` dims."""
    indexed = f"max_pool{k}d_with_indices adaptive_max_pool{k}d_with_indices"
    # An average of partial sums is a partial average; a maximum of them is not one of the total.
    average = Rule("pooling", _pooling(k, linear=True))
    return {
        **entries(f"avg_pool{k}d adaptive_avg_pool{k}d", average, _PLACES),
        **entries(f"lp_pool{k}d max_pool{k}d", Rule("pooling", _pooling(k)), _PLACES),
        **entries(indexed, Rule("pooling", _pooling(k, 2)), _PLACES),
        **entries(f"max_unpool{k}d", Rule("pooling", _unpooling(k)), _PLACES),
        # In torch.nn.functional a flag asks for the indices.
        **entries(f"max_pool{k}d", Rule("pooling", _pooling(k, flag=6)), (F,)),
        **entries(f"adaptive_max_pool{k}d", Rule("pooling", _pooling(k, flag=2)), (F,)),
    }


_GRID = "grid_sample grid_sampler grid_sampler_2d grid_sampler_3d"
_FOLDS = "channel_shuffle native_channel_shuffle unfold fold"
RULES: dict[Any, Rule] = {
    **_pooling_rules(1),
    **_pooling_rules(2),
    **_pooling_rules(3),
    torch.adaptive_max_pool1d: Rule("pooling", _pooling(1, 2)),
    **entries("interpolate", Rule("resizing", _resized), _PLACES),
    **entries("pixel_shuffle pixel_unshuffle", Rule("pixel shuffle", _shuffled), _PLACES),
    **entries(_FOLDS, Rule("folding", _batch_only), _PLACES),
    **entries(_GRID, Rule("sampling grid", _sampled), _PLACES),
}
