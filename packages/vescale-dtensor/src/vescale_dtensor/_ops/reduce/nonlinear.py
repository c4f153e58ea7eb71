"""Other reductions: every rank reduces its shard, and the ranks' results are combined.

One result per rank is sent, never the operand. `max` and its kin gather all ranks' results: where
each came from is known then, as gradients and indices need it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import broadcast_letters
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    as_partial_value,
    extreme_identity,
    is_refused,
    pad_empty_dims,
    restore_dims,
    sharded_dim_strategy,
    straight_through,
    with_sharded_kernel,
)
from vescale_dtensor._ops.reduce.linear import partial_norm, reduced_dims, reduction_letters
from vescale_dtensor._ops.reduce.log_sums import log_of_sums, scaled_sum
from vescale_dtensor._ops.reduce.whole_norm import whole_norm
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._torch.compat import any_autocast
from vescale_dtensor._torch.opmath import product_dtype, result_dtype, to_opmath

Axes = tuple[int, ...]


class ShardedReduction(ShardedDims):
    """One reduction over sharded dims, as this rank sees it.

    Attributes:
        x: the local tensor.
        dims: the dims that are reduced.
        keepdim: whether the results keep them.
        args, kwargs: local arguments of the call.
    """

    def __init__(
        self, context: LocalContext, dims: tuple[int, ...], keepdim: bool, args: Any, kwargs: Any
    ) -> None:
        self.x: Tensor = args[0]
        self.dims, self.keepdim = dims, keepdim
        self.args, self.kwargs = args, kwargs
        super().__init__(context, dims)

    def local_result(self, x: Tensor | None = None) -> Any:
        """The function's own result for the local tensor, or for `x` in its place."""
        return self.func(self.x if x is None else x, *self.args[1:], **self.kwargs)

    def padded(self, largest: bool) -> Tensor:
        """The local tensor, with the identity of an extreme where the shard is empty.

        Torch refuses the extreme of an empty dim: right for a global one, wrong for a shard.
        """
        identity = extreme_identity(self.x.dtype, largest=largest)
        return pad_empty_dims(self.x, self.dims, identity) if self.element_count() else self.x

    def as_output(self, x: Tensor) -> Tensor:
        """A value that all ranks have, as the plan wants it: replicated, or as a partial sum."""
        partial = any(self.context.output_layout().placements[a].is_partial() for a in self.axes)
        return as_partial_value(x, self.layout, self.axes) if partial else x

    def element_count(self) -> int:
        """How many elements are reduced to one, in the global tensor."""
        shape = self.context.call.operands[0].shape
        return prod(shape[d] for d in self.dims)


Combine = Callable[[ShardedReduction], Any]


def _reduction_strategy(
    combine: Combine,
    outputs: tuple[bool, ...] = (True,),
    parse: Callable[[OpCall], tuple[tuple[int, ...] | None, bool]] | None = None,
    *,
    warns: bool = False,
) -> Callable[[OpCall], Strategy | None]:
    """The strategy of a reduction, given how the ranks' results combine.

    Args:
        combine: gives this rank's results.
        outputs: per output, whether it is differentiable.
        parse: the dims that a call reduces, and whether they are kept.
        warns: whether the function warns about a tensor without elements: a shard may be empty
            where the global tensor is not.
    """

    def strategy(call: OpCall) -> Strategy | None:
        dims, keepdim = (parse or _usual)(call)
        if dims is None or len(call.operands) != 1 or len(set(dims)) != len(dims):
            return None
        if is_refused(call):
            return None
        operand, result = reduction_letters(call.operands[0].ndim, dims, keepdim)
        partial = [call.differentiable and each for each in outputs]

        def kernel(context: LocalContext, args: Any, kwargs: Any) -> Any:
            return combine(ShardedReduction(context, dims, keepdim, args, kwargs))

        found = sharded_dim_strategy(operand, (result,) * len(outputs), dims, partial)
        return with_sharded_kernel(found, dims, kernel, or_empty=warns)

    return strategy


def _usual(call: OpCall) -> tuple[tuple[int, ...] | None, bool]:
    return reduced_dims(call), bool(call.argument(2, "keepdim", False))


def _prod(reduction: ShardedReduction) -> Tensor:
    own = reduction.kwargs.get("dtype") or _own_dtype(torch.prod, reduction.x)
    wide = product_dtype(own)
    widened = wide is not own
    if widened:
        # The product of a shard may be too large, or too small, where that of all is not.
        reduction.kwargs = {**reduction.kwargs, "dtype": wide}
    # Gathered and not all-reduced: torch's derivative of `prod` handles zeros among the factors.
    total = torch.prod(reduction.gather(reduction.local_result()), 0)
    return reduction.as_output(total.to(own) if widened else total)


def _own_dtype(func: Callable[..., Tensor], x: Tensor) -> torch.dtype:
    """The dtype of a reduction; torch is asked where that may be another than the operand's."""
    asks = any_autocast() or not (x.is_floating_point() or x.is_complex())
    return result_dtype(func, x.new_zeros(1), 0) if asks else x.dtype


def _logical(reduction: ShardedReduction) -> Tensor:
    stack = reduction.gather(reduction.local_result())
    return stack.any(0) if reduction.func.__name__ == "any" else stack.all(0)


def _logsumexp(reduction: ShardedReduction) -> Tensor:
    x = reduction.x
    if x.is_complex():
        return reduction.as_output(reduction.gather(reduction.local_result()).logsumexp(0))
    own = _own_dtype(torch.logsumexp, x)
    part = scaled_sum(to_opmath(x.to(own)), reduction.dims, reduction.keepdim)
    return reduction.as_output(log_of_sums(reduction.gather(part)).to(own))


def _extreme(reduction: ShardedReduction) -> Tensor:
    """`amax`, `amin`, and `max()`, `min()` of everything: ties share the gradient."""
    return _largest(reduction, reduction.func.__name__ in ("amax", "max"))


def _largest(reduction: ShardedReduction, largest: bool) -> Tensor:
    x = reduction.x
    reduce = torch.amax if largest else torch.amin
    with torch.no_grad():
        own = reduce(reduction.padded(largest), reduction.dims, reduction.keepdim)
        best = reduce(reduction.gather(own), 0)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return reduction.as_output(best)
    wide = best if reduction.keepdim else restore_dims(best, reduction.dims)
    tied = x == wide
    ties = reduction.total(tied.sum(reduction.dims, keepdim=reduction.keepdim))
    if reduction.func.__name__.endswith("norm"):
        ties = ties.clamp(min=1)  # torch's gradient of a norm is zero where that is NaN
    # Ties share the gradient, over all ranks. Not `where`: NaN ties with nothing, so that the
    # quotient is 0 / 0, and torch's gradient is NaN then, too.
    share = (x * tied.to(x.dtype)).sum(reduction.dims, keepdim=reduction.keepdim) / ties
    return straight_through(reduction.as_output(best), share)


def _aminmax(reduction: ShardedReduction) -> Any:
    pair = (_largest(reduction, largest=False), _largest(reduction, largest=True))
    return torch.return_types.aminmax(pair)


def _with_index(reduction: ShardedReduction) -> Any:
    """`max(dim)`, `min(dim)`: the first of the best, and where it is."""
    name = reduction.func.__name__
    (dim,) = reduction.dims
    values, indices = reduction.local_result(reduction.padded(name == "max"))
    # Candidates of all ranks, with global indices: each rank finds the same winner.
    with torch.no_grad():
        indices = indices + reduction.offsets[dim]
        stack, where = reduction.gather(values), reduction.gather(indices)
        winner = _winner(stack, where, name == "max", reduction.context.call.operands[0].shape[dim])
        best = stack.gather(0, winner)[0]
        index = where.gather(0, winner)[0]
    types = getattr(torch.return_types, name)
    if not (torch.is_grad_enabled() and reduction.x.requires_grad):
        return types((reduction.as_output(best), index))
    # Only the rank that has the chosen element passes the gradient on.
    mine = winner[0] == reduction.rank
    return types((straight_through(reduction.as_output(best), torch.where(mine, values, 0)), index))


def _winner(stack: Tensor, where: Tensor, largest: bool, extent: int) -> Tensor:
    """Along dim 0, the rank with the best value; the first in the tensor wins ties, and NaN all."""
    best = stack.amax(0, True) if largest else stack.amin(0, True)
    good = (stack == best) | (stack.isnan() & best.isnan())
    # The identity that stands in for an empty shard may tie with the best; its index is behind the
    # end of the dim, so that a real element wins.
    return torch.where(good, where, torch.iinfo(torch.int64).max).argmin(0, keepdim=True)


def _arg(reduction: ShardedReduction) -> Tensor:
    """`argmax`, `argmin`: along one dim, or of everything, flattened."""
    largest = reduction.func.__name__ == "argmax"
    x = reduction.x
    everything = len(reduction.dims) != 1 or reduction.context.call.argument(1, "dim") is None
    # An empty global tensor stays empty, so that torch refuses it on every rank.
    padded = reduction.padded(largest)
    at = reduction.local_result(padded)
    flat = padded.flatten() if everything else padded
    dim = 0 if everything else reduction.dims[0]
    index = at.reshape(1) if everything else (at if reduction.keepdim else at.unsqueeze(dim))
    values = flat.gather(dim, index)
    shape = tuple(reduction.context.call.operands[0].shape)
    if everything:
        # From the flat local index to the flat global one, by the global place in each dim.
        places = torch.unravel_index(index, padded.shape)
        index = torch.zeros_like(index)
        for extent, begin, own in zip(shape, reduction.offsets, places, strict=True):
            index = index * extent + begin + own
    else:
        index = index + reduction.offsets[dim]
    if x.numel() == 0:
        # The index into the padding means nothing: an empty shard must not win a tie.
        index = torch.full_like(index, torch.iinfo(torch.int64).max - 1)
    stack, where = reduction.gather(values), reduction.gather(index)
    found = where.gather(0, _winner(stack, where, largest, 0))[0]
    return found.reshape(at.shape)


def _vector_norm(reduction: ShardedReduction) -> Tensor:
    order = reduction.context.call.argument(1, "ord", 2)
    dtype = reduction.context.call.kwargs.get("dtype")
    # An extreme of absolute values, so that its gradient is shared among ties.
    if order in (torch.inf, -torch.inf):
        reduction.x = reduction.x.abs()
        reduction.x = reduction.x if dtype is None else reduction.x.to(dtype)
        return _largest(reduction, order > 0)
    x = reduction.x
    if order < 0 and reduction.element_count():
        # Torch refuses this norm of an empty tensor: right for a global one, wrong for a shard.
        x = pad_empty_dims(x, reduction.dims, torch.inf)
    with torch.no_grad():
        how = (order, reduction.dims, reduction.keepdim)
        norms = reduction.gather(torch.linalg.vector_norm(x, *how, dtype=dtype))
        # The norm of norms, but for order zero, which counts.
        total = norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)
    if torch.is_grad_enabled() and reduction.x.requires_grad:
        total = whole_norm(reduction.x, total, *how, reduction.layout, reduction.axes)
    return reduction.as_output(total)


def _norm(call: OpCall) -> Strategy | None:
    # The common case (clipping gradients) is reduced late, and by one number.
    if call.argument(1, "ord", 2) == 2 and not call.differentiable:
        return partial_norm(call)
    return _reduction_strategy(_vector_norm, parse=_norm_dims)(call)


def _norm_dims(call: OpCall) -> tuple[tuple[int, ...] | None, bool]:
    order = call.argument(1, "ord", 2)
    if not isinstance(order, int | float) or call.argument(0, "x") is None:
        return None, False
    return reduced_dims(call, 2), bool(call.argument(3, "keepdim", False))


def _variance_dims(call: OpCall) -> tuple[tuple[int, ...] | None, bool]:
    """`var(unbiased)` or `var(dim, unbiased, keepdim)`, or `correction` by name."""
    if len(call.args) > 1 and isinstance(call.args[1], bool):
        dims = tuple(range(call.operands[0].ndim))
        return (dims, False) if len(call.args) == 2 else (None, False)
    keepdim = call.args[3] if len(call.args) > 3 else call.kwargs.get("keepdim", False)
    return reduced_dims(call), bool(keepdim)


def _correction(call: OpCall) -> float:
    given = call.kwargs.get("correction")
    if given is None:
        flags = [v for v in call.args[1:3] if isinstance(v, bool)]
        unbiased = flags[0] if flags else call.kwargs.get("unbiased", True)
        given = int(bool(unbiased))
    return float(given)


def _variance(reduction: ShardedReduction) -> Any:
    """Two passes, mean first: `E[x²] - E[x]²` would lose all digits to a large mean."""
    own = reduction.x.dtype.to_real()  # the variance of complex numbers is real
    # As wide as torch's own sums: squares and sums of floats may be beyond their range.
    x = reduction.x.to(product_dtype(reduction.x.dtype))
    dims, count = reduction.dims, reduction.element_count()
    mean = reduction.total(x.sum(dims, keepdim=True)) / count
    away = (x - mean).abs().square() if x.is_complex() else (x - mean).square()
    # Fewer elements than the correction: torch gives infinity, or NaN for zero over zero.
    degrees = max(0.0, count - _correction(reduction.context.call))
    squares = reduction.total(away.sum(dims, keepdim=reduction.keepdim))
    spread = squares / degrees if degrees else squares * torch.inf
    name = reduction.func.__name__
    if name.startswith("std"):
        constant = spread == 0
        # The derivative of the root is infinite at zero, and torch's gradient is 0 there; the inner
        # `where` keeps infinity times zero out of backward.
        spread = torch.where(constant, 0, torch.where(constant, 1, spread).sqrt())
    spread = spread.to(own)
    if not name.endswith("_mean"):
        return reduction.as_output(spread)
    kept = mean if reduction.keepdim else mean.squeeze(dims)
    return reduction.as_output(spread), reduction.as_output(kept.to(reduction.x.dtype))


_READS = Reads.NUMBERS | Reads.BROADCAST_PATTERN


def _max(call: OpCall) -> Strategy | None:
    if len(call.operands) == 2:  # `maximum` and `minimum` by their other name
        inputs, output = broadcast_letters(call.shapes())
        return Signature(inputs, (output,)).strategy()
    if len(call.args) > 1 or call.kwargs.keys() - {"input"}:
        if not isinstance(call.argument(1, "dim"), int):
            return None
        return _reduction_strategy(_with_index, (True, False))(call)
    return _reduction_strategy(_extreme)(call)


def _aminmax_dims(call: OpCall) -> tuple[tuple[int, ...] | None, bool]:
    dim = call.kwargs.get("dim")
    keepdim = bool(call.kwargs.get("keepdim", False))
    return (reduced_dims(call), keepdim) if dim is None or isinstance(dim, int) else (None, False)


RULES = {
    **entries("prod", Rule("prod", _reduction_strategy(_prod), _READS)),
    **entries("any all", Rule("any", _reduction_strategy(_logical, (False,)), _READS)),
    **entries("logsumexp", Rule("logsumexp", _reduction_strategy(_logsumexp), _READS)),
    **entries("amax amin", Rule("extreme", _reduction_strategy(_extreme), _READS)),
    **entries("max min", Rule("extreme", _max, _READS)),
    **entries("argmax argmin", Rule("extreme", _reduction_strategy(_arg, (False,)), _READS)),
    **entries(
        "aminmax",
        Rule("extreme", _reduction_strategy(_aminmax, (True, True), _aminmax_dims), _READS),
    ),
    **entries("vector_norm", Rule("vector_norm", _norm, _READS)),
    **entries(
        "var std",
        Rule("variance", _reduction_strategy(_variance, parse=_variance_dims, warns=True), _READS),
    ),
    **entries(
        "var_mean std_mean",
        Rule(
            "variance",
            _reduction_strategy(_variance, (True, True), _variance_dims, warns=True),
            _READS,
        ),
    ),
}
