"""Sums and means: kept dims may be sharded; where summed dims are, the result is partial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.placements import Partial, ReduceOp
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._ops.common.sharded_dim import as_partial_value, sum_over_axes
from vescale_dtensor._planning import (
    AxisStrategy,
    Dims,
    LocalContext,
    OpCall,
    Rule,
    Signature,
    Strategy,
)
from vescale_dtensor._planning.op_call import wrap_dim
from vescale_dtensor._torch.opmath import opmath_dtype, result_dtype


def reduced_dims(call: OpCall, position: int = 1, name: str = "dim") -> tuple[int, ...] | None:
    """The dims a call reduces, non-negative; None if there are no such dims."""
    ndim = call.operands[0].ndim
    dim = call.argument(position, name)
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tuple(range(ndim))
    if isinstance(dim, bool | str | Tensor | torch.dtype):
        return None
    # A number has one dim for this purpose, 0 or -1, which is then none to reduce.
    found = [wrap_dim(d, max(1, ndim)) for d in ([dim] if isinstance(dim, int) else dim)]
    known = tuple(d for d in found if d is not None)
    if len(known) < len(found):
        return None
    return known if ndim else ()


def reduction_letters(ndim: int, dims: tuple[int, ...], keepdim: bool) -> tuple[Dims, Dims]:
    """Letters of the operand and of the result."""
    kept = letters(ndim, dims)
    return letters(ndim), kept if keepdim else tuple(d for d in kept if d is not None)


def _reduction(
    call: OpCall,
    reduce: ReduceOp | None,
    local: Callable[..., Any] | None = None,
    linear: bool = False,
) -> Strategy | None:
    dims = reduced_dims(call)
    if dims is None or len(call.operands) != 1:
        return None
    operand, result = reduction_letters(
        call.operands[0].ndim, dims, bool(call.argument(2, "keepdim", False))
    )
    how: Mapping[Any, ReduceOp] = dict.fromkeys(dims, reduce) if reduce is not None else {}
    groups = ((0,),) if linear else ()
    total = reduce if _is_total(call) else None
    bind = _specialized if local is not None else None
    return Signature(
        (operand,),
        (result,),
        how,
        linear=groups,
        full_reduction=total,
        local=local,
        specialize=bind,
    ).strategy()


def _is_total(call: OpCall, position: int = 1) -> bool:
    """Whether all elements are reduced to one; the local call then holds for any number of dims."""
    dim = call.argument(position, "dim")
    return dim is None and not call.argument(position + 1, "keepdim", False)


def _sum(call: OpCall) -> Strategy | None:
    dtype, own = call.kwargs.get("dtype"), call.operands[0].dtype
    # A cast to integers comes before the sum: of partial operands it would round each by itself.
    rounded = dtype is not None and not dtype.is_floating_point and own.is_floating_point
    if opmath_dtype(dtype or own) is not (dtype or own) and _is_total(call):
        return _half_total(call)
    return _reduction(call, "sum", linear=not rounded and dtype is not torch.bool)


def _mean(call: OpCall) -> Strategy | None:
    # The dtype that was asked for counts: torch averages integers too, if they are cast.
    if not (call.kwargs.get("dtype") or call.operands[0].dtype).is_floating_point:
        return None  # complex, or what torch refuses
    own = call.kwargs.get("dtype") or call.operands[0].dtype
    if opmath_dtype(own) is not own and _is_total(call):
        return _half_total(call)
    return _reduction(call, "sum", _local_mean, linear=True)


def _half_total(call: OpCall) -> Strategy | None:
    """The sum or mean of all halves: reduced at once, in single precision, and rounded once.

    It is one number. Parts that each rank had rounded could not be added to it any more.
    """
    found = _reduction(call, "sum", _local_half_total)
    if found is None:
        return None
    # A partial operand is summed in the same way: what the rank has is one of the terms.
    summed = AxisStrategy((Partial(),), (Partial(),))
    return replace(found, candidates=(*found.candidates, summed), specialize=None)


def _local_half_total(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """The total on the first of the ranks that share the sum, and zeros on the others."""
    layout = context.output_layout()
    axes = tuple(a for a, p in enumerate(layout.placements) if p.is_partial())
    if not axes:
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    wanted = context.call.kwargs.get("dtype")
    # Autocast may have the total of halves in single precision.
    wanted = wanted or result_dtype(context.call.func, args[0].new_zeros(1))
    total = sum_over_axes(torch.sum(args[0], dtype=torch.float32), layout, axes)
    if context.call.func.__name__ == "mean":
        total = total / prod(context.call.operands[0].shape)
    return as_partial_value(total.to(wanted), layout, axes)


def _local_mean(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """This rank's part of the mean: its sum over the global count, also where shards are uneven."""
    call = context.call
    dims = reduced_dims(call)
    local: Tensor = args[0]
    # A plain mean of each shard would weigh the elements of short shards more.
    global_count = prod(call.operands[0].shape[d] for d in dims or ())
    wanted = call.kwargs.get("dtype")
    own = wanted or local.dtype
    # A sum of half floats may overflow where the mean does not, so single precision is used.
    summed = wanted if opmath_dtype(own) is own else opmath_dtype(own)
    # No dims are named here, so that a compiled call serves operands of any number of dims.
    if _is_total(call) and _split(context):
        return _rounded(torch.sum(local, dtype=summed) / global_count, own)
    if global_count == prod(local.shape[d] for d in dims or ()) or not _split(context):
        return call.func(*args, **kwargs)  # type: ignore[no-any-return]
    keepdim = bool(call.argument(2, "keepdim", False))
    return _rounded(torch.sum(local, dims, keepdim, dtype=summed) / global_count, own)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _specialized(context: LocalContext) -> Callable[..., Tensor] | None:
    """Torch's own mean, where no dim that is averaged is sharded."""
    return None if _split(context) else context.call.func


def _split(context: LocalContext) -> bool:
    return any(isinstance(p, Partial) for p in context.output_layout().placements)


def partial_norm(call: OpCall) -> Strategy | None:
    """A 2-norm without a gradient: a partial result, reduced when somebody reads it.

    With a gradient it is not: the derivative needs the global norm on every rank.
    """
    dims = reduced_dims(call, 2)
    if dims is None or len(call.operands) != 1:
        return None
    operand, result = reduction_letters(
        call.operands[0].ndim, dims, bool(call.argument(3, "keepdim", False))
    )
    total: ReduceOp | None = "norm2" if _is_total(call, 2) else None
    strategy = Signature(
        (operand,), (result,), dict.fromkeys(dims, "norm2"), full_reduction=total
    ).strategy()
    if len(dims) < len(operand):
        return strategy
    # The norm of partial norms is a norm again, so that norms of norms (as clipping takes them) are
    # reduced once, at the end.
    norms = Partial("norm2")
    joint = AxisStrategy((norms,), (norms,))
    return replace(strategy, candidates=(*strategy.candidates, joint))


def _count(call: OpCall) -> Strategy | None:
    # Not linear: zeros and NaNs of partial sums are not those of the total.
    return _reduction(call, "sum")


RULES = {
    **entries("sum", Rule("sum", _sum)),
    **entries("mean", Rule("mean", _mean)),
    **entries("nansum count_nonzero", Rule("sum", _count)),
}
