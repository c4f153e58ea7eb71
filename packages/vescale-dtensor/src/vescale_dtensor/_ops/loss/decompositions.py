"""Losses that torch composes in Python, written as operations that have rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import run_by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._ops.decompositions.tensor import handled_as
from vescale_dtensor._ops.loss.elementwise import reduction_of

_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "mean": torch.mean,
    "sum": torch.sum,
}


def _absolute(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Any:
    """`torch.nn.functional.l1_loss`."""
    given = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
    # torch's Python function does not hand `weight` on when it asks for overrides.
    weight = _lost_argument(F.l1_loss, "weight") if weight is None else weight
    if weight is None:
        # By the registry: users may have taught another rule.
        return run_by_rule(F.l1_loss, (input, target), given)
    kind = reduction_of(given)
    if weight.shape != input.shape or kind not in _REDUCED:
        # torch says what is wrong
        return fallback(F.l1_loss, (input, target), {**given, "weight": weight})
    errors = (input - target).abs() * weight
    # Both sums are global: means of shards would weigh uneven ones alike.
    return errors.sum() / weight.sum() if kind == "mean" else _REDUCED[kind](errors)


def _lost_argument(function: Any, name: str) -> Any:
    """An argument that a Python function of torch was called with and did not pass on.

    `torch.nn.functional.l1_loss` (torch 2.13) leaves out `weight` where it asks for overrides. Only
    its frame, which waits for the answer, still has it. None if no such frame or argument exists.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


def _triplet(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """`torch.nn.functional.triplet_margin_with_distance_loss`."""
    alike = anchor.ndim == positive.ndim == negative.ndim
    if reduction not in _REDUCED or margin <= 0 or not alike:
        return NotImplemented
    # A function of the user's is called on DTensors: its steps are planned one by one.
    apart = distance_function or torch.pairwise_distance
    near, far = apart(anchor, positive), apart(anchor, negative)
    if swap:
        far = torch.minimum(far, apart(positive, negative))
    return _REDUCED[reduction](torch.clamp_min(margin + near - far, 0))


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """`torch.nn.functional.linear_cross_entropy`; classes that are sharded stay sharded."""
    shape = tuple(linear_weight.shape)
    fits = input.ndim in (1, 2) and len(shape) >= 2 and input.shape[-1] == shape[-1]
    # Global shapes, so that all ranks leave what does not fit to torch, or none does.
    fits = fits and (linear_bias is None or tuple(linear_bias.shape) == shape[:-1])
    logits_shape = (*input.shape[:-1], *shape[:-1])
    shares = tuple(target.shape) == logits_shape
    if not fits or (input.ndim == 1 and len(shape) > 2) or (shares and ignore_index is not None):
        return NotImplemented
    if len(shape) > 2:
        linear_weight = linear_weight.flatten(0, -2)
        linear_bias = None if linear_bias is None else linear_bias.flatten()
    # Sharded classes stay so from here to the loss, whose rule gathers no logits.
    logits = F.linear(input, linear_weight, linear_bias)
    if len(shape) > 2:
        logits = torch.unflatten(logits, 1, shape[:-1])
    return F.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


_FUSED: Any = getattr(F, "linear_cross_entropy", None)  # since torch 2.12
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.l1_loss: _absolute,
    **handled_as({F.triplet_margin_with_distance_loss: _triplet}),
    **handled_as({} if _FUSED is None else {_FUSED: _linear_cross_entropy}),
}
