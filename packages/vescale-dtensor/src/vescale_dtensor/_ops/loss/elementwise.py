"""Losses that are a sum or a mean of what each element, or each row, contributes.

Every dim that is summed may be split: each rank holds a term. A mean divides by the global count,
so that uneven pieces give the loss of one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._ops.common.functions import in_order
from vescale_dtensor._ops.common.sharded_dim import cutting, summed
from vescale_dtensor._ops.pointwise.pointwise import broadcast_letters, order_of_operand
from vescale_dtensor._planning.op_call import Call, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import Dims, Signature, Strategy
from vescale_dtensor._torch.opmath import total

Letters = Callable[[Call], tuple[tuple[Dims, ...], Dims] | None]
"""Dims of the operands, and of what the loss is a sum of; None where the rule does not hold."""


def _loss(letters: Letters) -> Callable[[Call], Strategy | None]:
    def strategy(call: Call) -> Strategy | None:
        given = _given(call.func, call.args, call.kwargs)
        if given is None:
            return None
        reduction = reduction_of(given)
        tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
        if reduction not in ("none", "mean", "sum", "batchmean") or len(tensors) < 2:
            return None
        if len(tensors) != len(call.operands) or not in_order(call, " ".join(_names(call.func))):
            return None
        found = letters(call)
        if found is None:
            return None
        inputs, terms = found
        summed = {} if reduction == "none" else dict.fromkeys(terms, "sum")
        summed.pop(None, None)
        strategy = Signature(
            inputs,
            (terms if reduction == "none" else (),),
            summed,  # type: ignore[arg-type]
            local=_summed(terms, reduction),
        ).strategy()
        ordered = any(order_of_operand(call, i) for i in range(len(call.operands)))
        return replace(strategy, reorders="real") if ordered else strategy

    return strategy


def reduction_of(given: dict[str, Any]) -> Any:
    """What a loss is reduced to, also where it is said in two flags, as it was once."""
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


def _given(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
    names = _names(func)
    if len(args) > len(names):
        return None
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _summed(terms: Dims, reduction: str) -> Callable[..., Tensor]:
    """This rank's term of the loss."""

    def local(run: Run, args: Any, kwargs: Any) -> Tensor:
        layouts = [need.layout for need in run.plan.needs]
        whole = all(layout.replicated == layout.active for layout in layouts)
        if reduction == "none" or whole:
            return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
        given = _given(run.call.func, args, kwargs)
        assert given is not None
        losses: Tensor = run.call.func(**unreduced(given))
        if reduction == "sum":
            return total(losses)
        if reduction == "batchmean":
            return total(losses, run.call.operands[0].shape[0])
        if run.call.func is F.mse_loss and given.get("weight") is not None:
            return total(losses, _whole_weight(given["weight"], run))
        return total(losses, _count(terms, run))

    return local


def _whole_weight(weight: Tensor, run: Run) -> Tensor:
    """The sum of the weights of all elements."""
    layout = run.input_layout(len(run.call.operands) - 1)
    axes = cutting(layout, range(weight.ndim))
    here = weight.sum()
    return summed(here, layout, axes) if axes else here


def _count(terms: Dims, run: Run) -> int:
    """How many terms the mean is of, over all ranks."""
    extents: dict[Any, int] = {}
    inputs = run.plan.strategy.letters
    for dims, operand in zip(inputs, run.call.operands, strict=True):
        for letter, extent in zip(dims, operand.shape, strict=True):
            if letter is not None:
                extents[letter] = extent
    return prod(extents[letter] for letter in terms if letter is not None)


def _elements(call: Call) -> tuple[tuple[Dims, ...], Dims]:
    """Operands of one shape, or that are broadcast to it."""
    return broadcast_letters(call.shapes())


def _same(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    """Operands of one shape only."""
    shapes = call.shapes()
    return _elements(call) if all(shape == shapes[0] for shape in shapes) else None


def _scored(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    """Operands of one shape, and weights that are broadcast to it."""
    shapes = call.shapes()
    found = broadcast_letters(shapes)
    wider = len(shapes) > 2 and torch.broadcast_shapes(*shapes) != shapes[0]  # type: ignore[no-untyped-call]
    return None if shapes[0] != shapes[1] or wider else found


def _unweighted(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    return _elements(call) if len(call.operands) == 2 else None


def _weighted(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    """A weight is as large as the input."""
    return _unweighted(call) if len(call.operands) == 2 else _same(call)


def _likelihood(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    """`gaussian_nll_loss`: a variance for each element, or for all along one dim."""
    shapes = call.shapes()
    if not 2 <= len(shapes) <= 3 or shapes[0] != shapes[1] or not shapes[0]:
        return None
    dims = tuple(range(len(shapes[0])))
    if len(shapes) == 2:
        return (dims, dims), dims
    shape, variance = shapes[0], shapes[2]
    if variance == shape[:-1]:
        return (dims, dims, dims[:-1]), dims
    others = [d for d in dims if len(variance) == len(shape) and variance[d] != shape[d]]
    if len(variance) != len(shape) or [variance[d] for d in others] not in ([], [1]):
        return None
    return (dims, dims, tuple(None if d in others else d for d in dims)), dims


def _divergence(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    return _same(call) if call.operands[0].ndim else None


def _rows(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
    """Features stay whole: triplets, labels of one row."""
    shapes = call.shapes()
    if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
        return None
    dims: Dims = (*range(len(shapes[0]) - 1), None)
    return (dims,) * len(shapes), dims[:-1]


def _labels(call: Call) -> tuple[tuple[Dims, ...], Dims] | None:
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
    getattr(F, name): Rule("loss", _loss(letters), Reads.NUMBERS | Reads.SHAPES)
    for names, letters in _RULES
    for name in names.split()
}
