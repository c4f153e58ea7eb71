"""Losses that sum or average what each element, or each row, contributes.

Every dim that is summed may be sharded: the result is a partial sum. A mean divides by the global
count, so that uneven shards give the loss of one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._ops.common.functions import by_name
from vescale_dtensor._ops.common.letters import broadcast_letters, letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.common.sharded_dim import (
    gather_stacked,
    sharding_axes,
    sum_over_axes,
    unless_refused,
)
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._torch.opmath import opmath_sum

Letters = Callable[[OpCall], tuple[tuple[Dims, ...], Dims] | None]
"""Dims of the operands, and of what the loss is a sum of; None where the rule does not hold."""


def _loss(letters: Letters) -> Callable[[OpCall], Strategy | None]:
    def strategy(call: OpCall) -> Strategy | None:
        given = _named_arguments(call.func, call.args, call.kwargs)
        if given is None:
            return None
        reduction = reduction_of(given)
        # Margins and variances may be numbers or tensors: letters are for tensors.
        tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        if reduction not in ("none", "mean", "sum", "batchmean") or len(tensors) < 2:
            return None
        if len(tensors) != len(call.operands):
            return None
        found = letters(call)
        if found is None:
            return None
        inputs, elements = found
        summed = {} if reduction == "none" else dict.fromkeys(elements, "sum")
        summed.pop(None, None)  # dims that are broadcast have no letter
        # An unreduced loss keeps the memory order of its operands, in ways that only torch knows.
        ordered = any(order_of_operand(call, i) for i in range(len(call.operands)))
        return Signature(
            inputs,
            (elements if reduction == "none" else (),),
            summed,  # type: ignore[arg-type]
            local=_reduced_locally(elements, reduction),
            probe_order="real" if ordered else None,
        ).strategy()

    return strategy


def reduction_of(given: dict[str, Any]) -> Any:
    """The reduction of a loss, also where the two deprecated flags say it."""
    average, reduce = given.get("size_average"), given.get("reduce")
    if average is None and reduce is None:
        return given.get("reduction", "mean")
    if reduce is False:
        return "none"
    return "mean" if average is None or average else "sum"


def unreduced(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, for a loss that is not reduced."""
    flags = {"size_average", "reduce"}
    return {**{k: v for k, v in given.items() if k not in flags}, "reduction": "none"}


@lru_cache(maxsize=64)
def _names(func: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def _named_arguments(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
    names = _names(func)
    if len(args) > len(names):
        return None
    return by_name(names, args, kwargs)


def _reduced_locally(elements: Dims, reduction: str) -> Callable[..., Tensor]:
    """The local call: this rank's part of the loss, a partial sum."""

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        if context.call.func is F.gaussian_nll_loss:
            _refuse_negative_variance(context, args, kwargs)
        layouts = [need.layout for need in context.plan.uses]
        replicated = all(layout.replicated == layout.active for layout in layouts)
        # No rank lacks an element: torch's own reduction rounds as on one device.
        if reduction == "none" or replicated:
            return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
        given = _named_arguments(context.call.func, args, kwargs)
        assert given is not None
        # Torch's own mean divides by the local count: elements of uneven shards would weigh
        # differently.
        losses: Tensor = context.call.func(**unreduced(given))
        if reduction == "sum":
            return opmath_sum(losses)
        if reduction == "batchmean":
            # By the global number of rows, as torch's "batchmean" does.
            return opmath_sum(losses, context.call.operands[0].shape[0])
        if context.call.func is F.mse_loss and given.get("weight") is not None:
            return opmath_sum(losses, _total_weight(given["weight"], context))
        return opmath_sum(losses, _count(elements, context))

    return local


def _refuse_negative_variance(context: LocalContext, args: Any, kwargs: Any) -> None:
    """What torch refuses by looking at values, and here would for one rank's values only.

    Raises:
        ValueError: torch's. On every rank.
    """
    given = _named_arguments(context.call.func, args, kwargs)
    variance = None if given is None else given.get("var")
    if not isinstance(variance, Tensor):
        return
    layout = context.input_layout(len(context.call.operands) - 1)
    axes = sharding_axes(layout, range(variance.ndim))
    # Not where it is replicated: every rank looks at the same values in torch's function.
    if axes and bool(gather_stacked((variance.detach() < 0).any(), layout, axes).any()):
        raise ValueError("var has negative entry/entries")


def _total_weight(weight: Tensor, context: LocalContext) -> Tensor:
    """The sum of the weights over all ranks."""
    layout = context.input_layout(len(context.call.operands) - 1)
    axes = sharding_axes(layout, range(weight.ndim))
    # A sharded weight differs by rank, and every rank divides by the sum of all.
    here = weight.sum()
    return sum_over_axes(here, layout, axes) if axes else here


def _count(elements: Dims, context: LocalContext) -> int:
    """The global number of elements over which the mean is taken."""
    # By the letters, since a broadcast operand lacks extents that others have.
    extents: dict[Any, int] = {}
    inputs = context.plan.strategy.letters
    for dims, operand in zip(inputs, context.call.operands, strict=True):
        for letter, extent in zip(dims, operand.shape, strict=True):
            if letter is not None:
                extents[letter] = extent
    return prod(extents[letter] for letter in elements if letter is not None)


def _elements(call: OpCall) -> tuple[tuple[Dims, ...], Dims]:
    """Operands of one shape, or that are broadcast to it."""
    return broadcast_letters(call.shapes())


def _same(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """Operands of one shape only."""
    shapes = call.shapes()
    return _elements(call) if all(shape == shapes[0] for shape in shapes) else None


def _scored(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """Operands of one shape, and weights that are broadcast to it."""
    shapes = call.shapes()
    found = broadcast_letters(shapes)
    wider = len(shapes) > 2 and torch.broadcast_shapes(*shapes) != shapes[0]  # type: ignore[no-untyped-call]
    return None if shapes[0] != shapes[1] or wider else found


def _unweighted(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    return _elements(call) if len(call.operands) == 2 else None


def _weighted(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """Operands of one shape, with weights of that shape or none."""
    return _unweighted(call) if len(call.operands) == 2 else _same(call)


def _likelihood(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """`gaussian_nll_loss`: a variance for each element, or for all along one dim."""
    shapes = call.shapes()
    # Global shapes: a shard with one row could pass for a variance that is broadcast.
    if not 2 <= len(shapes) <= 3 or shapes[0] != shapes[1] or not shapes[0]:
        return None
    dims = letters(len(shapes[0]))
    if len(shapes) == 2:
        return (dims, dims), dims
    shape, variance = shapes[0], shapes[2]
    if variance == shape[:-1]:
        return (dims, dims, dims[:-1]), dims
    others = [d for d in dims if len(variance) == len(shape) and variance[d] != shape[d]]
    if len(variance) != len(shape) or [variance[d] for d in others] not in ([], [1]):
        return None
    return (dims, dims, tuple(None if d in others else d for d in dims)), dims


def _divergence(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    return _same(call) if call.operands[0].ndim else None


def _rows(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """Losses of rows, whose features are not sharded: triplets, several labels."""
    shapes = call.shapes()
    if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
        return None
    dims: Dims = (*range(len(shapes[0]) - 1), None)
    return (dims,) * len(shapes), dims[:-1]


def _labels(call: OpCall) -> tuple[tuple[Dims, ...], Dims] | None:
    """Rows of scores with one label each, or of two embeddings."""
    shapes = call.shapes()
    if [len(shape) for shape in shapes] == [1, 1, 0] and shapes[0] == shapes[1]:
        return ((None,), (None,), ()), ()
    rows = shapes[0][:1]
    matrix = all(len(shape) == 2 and shape[0] == rows[0] for shape in shapes[:-1])
    if not matrix or shapes[-1] != rows:
        return None
    return ((*((("n", None),) * (len(shapes) - 1)), ("n",)), ("n",))


_RULES: tuple[tuple[str, Letters], ...] = (
    ("mse_loss huber_loss", _weighted),
    ("l1_loss smooth_l1_loss", _unweighted),
    ("poisson_nll_loss soft_margin_loss hinge_embedding_loss", _unweighted),
    ("binary_cross_entropy", _scored),
    ("binary_cross_entropy_with_logits", _elements),
    ("margin_ranking_loss", _same),
    ("kl_div", _divergence),
    ("gaussian_nll_loss", _likelihood),
    ("triplet_margin_loss multilabel_soft_margin_loss multilabel_margin_loss", _rows),
    ("cosine_embedding_loss multi_margin_loss", _labels),
)
RULES = {
    getattr(F, name): Rule("loss", unless_refused(_loss(letters)), Reads.NUMBERS | Reads.SHAPES)
    for names, letters in _RULES
    for name in names.split()
}
