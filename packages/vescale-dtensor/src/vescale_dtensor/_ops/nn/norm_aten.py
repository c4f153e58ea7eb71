"""Normalisation by torch's native names, which return the statistics as further results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._ops.common.empty_shards import pad_empty_shards
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.nn.norm import normalise_batch
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy


def _layer_norm(call: OpCall) -> Strategy | None:
    """`native_layer_norm(input, normalized_shape, …)`: leading dims may be sharded."""
    shape = call.argument(1, "normalized_shape")
    ndim = call.operands[0].ndim
    lead = ndim - (1 if isinstance(shape, int) else len(tuple(shape)))
    if lead < 0:
        return None
    dims = letters(ndim)
    ones: Dims = (None,) * (ndim - lead)
    # Statistics have the leading dims, and ones for the rest.
    parameters = [dims[lead:] for _ in call.operands[1:]]
    # The normalised dims have no letter: the statistics of a row need all of it on one rank.
    kept = (*dims[:lead], *ones)
    inputs = (kept, *[(None,) * len(p) for p in parameters])
    return Signature(inputs, (kept, kept, kept)).strategy()


def _group_norm(call: OpCall) -> Strategy | None:
    """`native_group_norm(input, weight, bias, N, C, HxW, group, eps)`: the batch may be sharded."""
    image = call.operands[0]
    # Torch's kernel reads an image in another memory order in ways of its own.
    if len(call.args) != 8 or call.kwargs or image.ndim < 2 or not image.is_contiguous():
        return None
    inputs: list[Dims] = [("n", *(None,) * (image.ndim - 1))]
    inputs += [(None,) for _ in call.operands[1:]]
    outputs: list[Dims] = [inputs[0], ("n", None), ("n", None)]
    return Signature(
        tuple(inputs),
        tuple(outputs),
        # `varied`: padding of equal numbers has no variance, and could make gradients NaN.
        local=pad_empty_shards(inputs, outputs, _of_images_here, varied=True),
    ).strategy()


def _of_images_here(context: LocalContext, args: Any, kwargs: Any) -> Any:
    # The number of images is an argument of its own: the local one.
    return context.call.func(*args[:3], args[0].shape[0], *args[4:])


def _are_statistics_known(input: Tensor, momentum: Any) -> bool:
    """Whether torch returns the statistics below: others on accelerators, and in half precision."""
    wide = input.dtype in (torch.float32, torch.float64)
    return input.device.type == "cpu" and wide and input.ndim > 1 and momentum is not None


def _in_training(
    operands: tuple[Any, ...], running: tuple[Any, ...], momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the mean, and one over the deviation, of input, weight and bias."""
    input, weight, bias = operands
    mean, variance = running
    # Writes the running statistics, with those of the global batch: every rank writes the same.
    result, *found = normalise_batch(input, (mean, variance), weight, bias, momentum, eps)
    center, inverse = (statistic.detach().reshape(-1) for statistic in found)
    return result, center, inverse


def _native(func: Callable[..., Any]) -> Callable[..., Any]:
    """`native_batch_norm`, and `_native_batch_norm_legit`, also without running statistics."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) not in (6, 8) or not _are_statistics_known(args[0], args[-2]):
            return fallback(func, args, kwargs)
        running = (args[3], args[4]) if len(args) == 8 else (None, None)
        training, momentum, eps = args[-3:]
        one_each = args[0].numel() <= args[0].shape[1]  # per channel: there is no deviation
        # Of the global batch: all ranks take this branch or none does, whatever they hold.
        if one_each if training else any(statistic is None for statistic in running):
            return fallback(func, args, kwargs)
        if training:
            return _in_training(args[:3], running, momentum, eps)
        mean, variance = running
        result = F.batch_norm(args[0], mean, variance, args[1], args[2], False, momentum, eps)
        return result, result.detach().new_zeros(0), result.detach().new_zeros(0)

    return run


def _updating(func: Callable[..., Any]) -> Callable[..., Any]:
    """`aten._batch_norm_with_update`: always in training; its reserved workspace stays empty."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 7 or not _are_statistics_known(args[0], args[5]):
            return fallback(func, args, kwargs)
        # By the global count, so that no rank leaves alone before the collectives that follow.
        if args[0].numel() <= args[0].shape[1]:
            return fallback(func, args, kwargs)
        found = _in_training(args[:3], args[3:5], args[5], args[6])
        return (*found, found[0].detach().new_zeros(0, dtype=torch.uint8))

    return run


def _by_torch(named: Callable[..., Any], func: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.batch_norm` and `torch.instance_norm`: the same in another order."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 9:
            return fallback(func, args, kwargs)
        input, weight, bias, mean, variance, training, momentum, eps, _ = args
        return named(input, mean, variance, weight, bias, training, momentum, eps)

    return run


_UPDATING = torch.ops.aten._batch_norm_with_update
HANDLERS: dict[Any, Callable[..., Any]] = {
    **{f: _native(f) for f in (torch.native_batch_norm, torch._native_batch_norm_legit)},
    torch.batch_norm: _by_torch(F.batch_norm, torch.batch_norm),
    torch.instance_norm: _by_torch(F.instance_norm, torch.instance_norm),
    **{f: _updating(f) for f in (_UPDATING, _UPDATING.default)},
}
RULES = {
    torch.native_layer_norm: Rule(
        "layer_norm", _layer_norm, Reads.NUMBERS | Reads.BROADCAST_PATTERN
    ),
    torch.native_group_norm: Rule("group_norm", _group_norm, Reads.NUMBERS | Reads.SHAPES),
}
