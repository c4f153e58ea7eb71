"""Reductions that are no sums: every rank reduces its piece, and the results are combined.

What is sent is one result per rank, never the operand. `max` and the like ask for the results of
all ranks rather than for their maximum: so a NaN is found wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.sharded_dim import (
    as_term,
    carried,
    crossing,
    cutting,
    highest,
    lowest,
    place,
    stacked,
    starts,
    summed,
    with_something,
)
from vescale_dtensor._ops.pointwise.pointwise import broadcast_letters
from vescale_dtensor._ops.reduce.linear import letters, norm_of_pieces, reduced_dims
from vescale_dtensor._planning.op_call import Call, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import Signature, Strategy
from vescale_dtensor._torch.opmath import widened

Axes = tuple[int, ...]


class Across:
    """The arguments of one reduction, on a rank that holds a piece of what is reduced.

    Attributes:
        x: the piece.
        dims: that are reduced, of the piece.
        keepdim: whether the results keep them.
        layout: of the operand.
        axes: mesh axes that cut these dims.
        run, args, kwargs: the call.
    """

    def __init__(
        self, run: Run, dims: tuple[int, ...], keepdim: bool, args: Any, kwargs: Any
    ) -> None:
        self.x: Tensor = args[0] if args else kwargs["input"]
        self.run, self.dims, self.keepdim = run, dims, keepdim
        self.args, self.kwargs = args, kwargs
        self.layout: Layout = run.input_layout(0)
        self.axes = cutting(self.layout, dims)

    def own(self, x: Tensor | None = None) -> Any:
        """The function's own result for the piece, or for `x` in its place."""
        if x is None:
            return self.run.call.func(*self.args, **self.kwargs)
        if self.args:
            return self.run.call.func(x, *self.args[1:], **self.kwargs)
        return self.run.call.func(**{**self.kwargs, "input": x})

    def stacked(self, x: Tensor) -> Tensor:
        """`x` of all ranks that share the dims, along a new first dim."""
        return stacked(x, self.layout, self.axes)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of `x` over those ranks, on each of them."""
        return summed(x, self.layout, self.axes) if self.axes else x

    def term(self, x: Tensor) -> Tensor:
        """What all of them know, as the plan wants it."""
        partial = any(self.run.output_layout().placements[a].is_partial() for a in self.axes)
        return as_term(x, self.layout, self.axes) if partial else x

    def count(self) -> int:
        """How many elements are reduced to one, in the global tensor."""
        shape = self.run.call.operands[0].shape
        return prod(shape[d] for d in self.dims)


Combine = Callable[[Across], Any]


def _rule(
    combine: Combine,
    outputs: tuple[bool, ...] = (True,),
    parse: Callable[[Call], tuple[tuple[int, ...] | None, bool]] | None = None,
    *,
    warns: bool = False,
) -> Callable[[Call], Strategy | None]:
    """The strategy of a reduction, given how pieces combine.

    Args:
        combine: gives this rank's results.
        outputs: per output, whether it is differentiable.
        parse: the dims that a call reduces, and whether they are kept.
        warns: whether the function warns about a tensor without elements, which a piece may be.
    """

    def strategy(call: Call) -> Strategy | None:
        dims, keepdim = (parse or _usual)(call)
        if dims is None or len(call.operands) != 1 or len(set(dims)) != len(dims):
            return None
        operand, result = letters(call.operands[0].ndim, dims, keepdim)
        terms = [call.differentiable and each for each in outputs]

        def local(run: Run, args: Any, kwargs: Any) -> Any:
            across = Across(run, dims, keepdim, args, kwargs)
            across_ranks = across.axes or (warns and not across.x.numel())
            return combine(across) if across_ranks else run.call.func(*args, **kwargs)

        def bind(run: Run) -> Callable[..., Any] | None:
            return None if warns or cutting(run.input_layout(0), dims) else run.call.func

        found = crossing(operand, (result,) * len(outputs), dims, terms)
        return replace(found, local=local, bind=bind)

    return strategy


def _usual(call: Call) -> tuple[tuple[int, ...] | None, bool]:
    return reduced_dims(call), bool(call.argument(2, "keepdim", False))


def _prod(across: Across) -> Tensor:
    return across.term(torch.prod(across.stacked(across.own()), 0))


def _logical(across: Across) -> Tensor:
    stack = across.stacked(across.own())
    return stack.any(0) if across.run.call.func.__name__ == "any" else stack.all(0)


def _logsumexp(across: Across) -> Tensor:
    return across.term(torch.logsumexp(across.stacked(across.own()), 0))


def _extreme(across: Across) -> Tensor:
    """`amax`, `amin`, and `max()`, `min()` of everything: ties share the gradient."""
    return _largest(across, across.run.call.func.__name__ in ("amax", "max"))


def _largest(across: Across, most: bool) -> Tensor:
    x = across.x
    # An extent of zero has no extreme, and torch says so; a piece may have none.
    inert = (lowest if most else highest)(x.dtype)
    reduce = torch.amax if most else torch.amin
    with torch.no_grad():
        held = with_something(x, across.dims, inert) if across.count() else x
        best = reduce(across.stacked(reduce(held, across.dims, across.keepdim)), 0)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return across.term(best)
    wide = best if across.keepdim else _widened(best, across.dims, x.ndim)
    tied = x == wide
    ties = across.summed(tied.sum(across.dims, keepdim=across.keepdim))
    # Not `where`: nothing ties with NaN, and torch's gradient is NaN then.
    share = (x * tied.to(x.dtype)).sum(across.dims, keepdim=across.keepdim) / ties
    return carried(across.term(best), share)


def _widened(x: Tensor, dims: tuple[int, ...], ndim: int) -> Tensor:
    """With the dims that were reduced."""
    return x[tuple(None if d in dims else slice(None) for d in range(ndim))]


def _both_extremes(across: Across) -> Any:
    pair = (_largest(across, most=False), _largest(across, most=True))
    return torch.return_types.aminmax(pair)


def _with_index(across: Across) -> Any:
    """`max(dim)`, `min(dim)`: the first of the best, and where it is."""
    name = across.run.call.func.__name__
    (dim,) = across.dims
    inert = (lowest if name == "max" else highest)(across.x.dtype)
    held = with_something(across.x, (dim,), inert) if across.count() else across.x
    values, indices = across.own(held)
    with torch.no_grad():
        indices = indices + starts(across.run)[dim]
        stack, where = across.stacked(values), across.stacked(indices)
        winner = _winner(stack, where, name == "max", across.run.call.operands[0].shape[dim])
        best = stack.gather(0, winner)[0]
        index = where.gather(0, winner)[0]
    types = getattr(torch.return_types, name)
    if not (torch.is_grad_enabled() and across.x.requires_grad):
        return types((across.term(best), index))
    mine = winner[0] == place(across.layout, across.axes)
    return types((carried(across.term(best), torch.where(mine, values, 0)), index))


def _winner(stack: Tensor, where: Tensor, most: bool, extent: int) -> Tensor:
    """Of the candidates along dim 0 the row of the best one that comes first; NaN is best."""
    best = stack.amax(0, True) if most else stack.amin(0, True)
    good = (stack == best) | (stack.isnan() & best.isnan())
    # An empty piece may offer what ties with the best: its index lies behind the tensor's end.
    return torch.where(good, where, torch.iinfo(torch.int64).max).argmin(0, keepdim=True)


def _arg(across: Across) -> Tensor:
    """`argmax`, `argmin`: along one dim, or of everything, flattened."""
    most = across.run.call.func.__name__ == "argmax"
    x = across.x
    inert = (lowest if most else highest)(x.dtype)
    everything = len(across.dims) != 1 or across.run.call.argument(1, "dim") is None
    held = with_something(x, across.dims, inert) if across.count() else x
    at = across.own(held)
    flat = held.flatten() if everything else held
    dim = 0 if everything else across.dims[0]
    index = at.reshape(1) if everything else (at if across.keepdim else at.unsqueeze(dim))
    values = flat.gather(dim, index)
    shape = tuple(across.run.call.operands[0].shape)
    if everything:
        places = torch.unravel_index(index, held.shape)
        index = torch.zeros_like(index)
        for extent, begin, own in zip(shape, starts(across.run), places, strict=True):
            index = index * extent + begin + own
    else:
        index = index + starts(across.run)[dim]
    if x.numel() == 0:
        index = torch.full_like(index, torch.iinfo(torch.int64).max - 1)
    stack, where = across.stacked(values), across.stacked(index)
    found = where.gather(0, _winner(stack, where, most, 0))[0]
    return found.reshape(at.shape)


def _vector_norm(across: Across) -> Tensor:
    """Norms of pieces combine as the norm of norms; those of order zero count."""
    order = across.run.call.argument(1, "ord", 2)
    if order in (torch.inf, -torch.inf):
        across.x = across.x.abs()
        dtype = across.run.call.kwargs.get("dtype")
        across.x = across.x if dtype is None else across.x.to(dtype)
        return _largest(across, order > 0)
    if order < 0 and across.count():
        # Nothing has no such norm, but the piece of something may be nothing.
        held = with_something(across.x, across.dims, torch.inf)
        dtype = across.run.call.kwargs.get("dtype")
        piece = torch.linalg.vector_norm(held, order, across.dims, across.keepdim, dtype=dtype)
    else:
        piece = across.own()
    pieces = across.stacked(piece)
    total = pieces.sum(0) if order == 0 else torch.linalg.vector_norm(pieces, order, 0)
    return across.term(total)


def _norm(call: Call) -> Strategy | None:
    if call.argument(1, "ord", 2) == 2 and not call.differentiable:
        return norm_of_pieces(call)
    return _rule(_vector_norm, parse=_norm_dims)(call)


def _norm_dims(call: Call) -> tuple[tuple[int, ...] | None, bool]:
    order = call.argument(1, "ord", 2)
    if not isinstance(order, int | float) or call.argument(0, "x") is None:
        return None, False
    return reduced_dims(call, 2), bool(call.argument(3, "keepdim", False))


def _variance_dims(call: Call) -> tuple[tuple[int, ...] | None, bool]:
    """`var(unbiased)` or `var(dim, unbiased, keepdim)`, or `correction` by name."""
    if len(call.args) > 1 and isinstance(call.args[1], bool):
        return (
            (tuple(range(call.operands[0].ndim)), False) if len(call.args) == 2 else (None, False)
        )
    keepdim = call.args[3] if len(call.args) > 3 else call.kwargs.get("keepdim", False)
    return reduced_dims(call), bool(keepdim)


def _correction(call: Call) -> float:
    given = call.kwargs.get("correction")
    if given is None:
        flags = [v for v in call.args[1:3] if isinstance(v, bool)]
        unbiased = flags[0] if flags else call.kwargs.get("unbiased", True)
        given = int(bool(unbiased))
    return float(given)


def _variance(across: Across) -> Any:
    """The mean first, then what deviates from it: no digits are lost to a large mean."""
    x, dims, count = widened(across.x), across.dims, across.count()
    own = across.x.dtype.to_real()
    mean = across.summed(x.sum(dims, keepdim=True)) / count
    away = (x - mean).abs().square() if x.is_complex() else (x - mean).square()
    degrees = max(0.0, count - _correction(across.run.call))
    squares = across.summed(away.sum(dims, keepdim=across.keepdim))
    spread = squares / degrees if degrees else squares * torch.inf
    name = across.run.call.func.__name__
    if name.startswith("std"):
        still = spread == 0
        # The root has no slope at zero; torch takes none.
        spread = torch.where(still, 0, torch.where(still, 1, spread).sqrt())
    spread = spread.to(own)
    if not name.endswith("_mean"):
        return across.term(spread)
    kept = mean if across.keepdim else mean.squeeze(dims)
    return across.term(spread), across.term(kept.to(across.x.dtype))


_READS = Reads.NUMBERS | Reads.EXTENTS


def _max(call: Call) -> Strategy | None:
    if len(call.operands) == 2:  # `maximum` and `minimum` by their other name
        inputs, output = broadcast_letters(call.shapes())
        return Signature(inputs, (output,)).strategy()
    if len(call.args) > 1 or call.kwargs.keys() - {"input"}:
        if not isinstance(call.argument(1, "dim", call.kwargs.get("axis")), int):
            return None
        return _rule(_with_index, (True, False))(call)
    return _rule(_extreme)(call)


def _aminmax_dims(call: Call) -> tuple[tuple[int, ...] | None, bool]:
    dim = call.kwargs.get("dim")
    keepdim = bool(call.kwargs.get("keepdim", False))
    return (reduced_dims(call), keepdim) if dim is None or isinstance(dim, int) else (None, False)


RULES = {
    **{f: Rule("prod", _rule(_prod), _READS) for f in functions("prod")},
    **{f: Rule("any", _rule(_logical, (False,)), _READS) for f in functions("any all")},
    **{f: Rule("logsumexp", _rule(_logsumexp), _READS) for f in functions("logsumexp")},
    **{f: Rule("extreme", _rule(_extreme), _READS) for f in functions("amax amin")},
    **{f: Rule("extreme", _max, _READS) for f in functions("max min")},
    **{f: Rule("extreme", _rule(_arg, (False,)), _READS) for f in functions("argmax argmin")},
    **{
        f: Rule("extreme", _rule(_both_extremes, (True, True), _aminmax_dims), _READS)
        for f in functions("aminmax")
    },
    **{f: Rule("vector_norm", _norm, _READS) for f in functions("vector_norm")},
    **{
        f: Rule("variance", _rule(_variance, parse=_variance_dims, warns=True), _READS)
        for f in functions("var std")
    },
    **{
        f: Rule("variance", _rule(_variance, (True, True), _variance_dims, warns=True), _READS)
        for f in functions("var_mean std_mean")
    },
}
