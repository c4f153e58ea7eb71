"""Sums and means: kept dims may be sharded, and summed dims too, as partial sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import LocalContext
from vescale_dtensor._layout.placements import Partial, ReduceOp
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters
from vescale_dtensor._planning import AxisStrategy, Dims, OpCall, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim
from vescale_dtensor._torch.opmath import opmath_dtype


def reduced_dims(call: OpCall, position: int = 1, name: str = "dim") -> tuple[int, ...] | None:
    """The dims a call reduces, non-negative; None if there are no such dims."""
    ndim = call.operands[0].ndim
    dim = call.argument(position, name)
    if dim is None or dim == () or dim == []:
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
    """Whether no dims are named, and none is kept: then it does not matter how many there are."""
    dim = call.argument(position, "dim")
    return dim is None and not call.argument(position + 1, "keepdim", False)


def _sum(call: OpCall) -> Strategy | None:
    dtype, own = call.kwargs.get("dtype"), call.operands[0].dtype
    # A cast to whole numbers comes before the sum, and drops what terms would have made up.
    rounded = dtype is not None and not dtype.is_floating_point and own.is_floating_point
    return _reduction(call, "sum", linear=not rounded and dtype is not torch.bool)


def _mean(call: OpCall) -> Strategy | None:
    if not (call.kwargs.get("dtype") or call.operands[0].dtype).is_floating_point:
        return None
    return _reduction(call, "sum", _mean_of_whole, linear=True)


def _mean_of_whole(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """This rank's term of the mean: its sum over the global count, right for uneven pieces."""
    call = context.call
    dims = reduced_dims(call)
    local: Tensor = args[0]
    whole = prod(call.operands[0].shape[d] for d in dims or ())
    wanted = call.kwargs.get("dtype")
    own = wanted or local.dtype
    # Of half floats the sum may be too large where the mean is not.
    summed = wanted if opmath_dtype(own) is own else opmath_dtype(own)
    if _is_total(call) and _split(context):
        return _rounded(torch.sum(local, dtype=summed) / whole, own)
    if whole == prod(local.shape[d] for d in dims or ()) or not _split(context):
        return call.func(*args, **kwargs)  # type: ignore[no-any-return]
    keepdim = bool(call.argument(2, "keepdim", False))
    return _rounded(torch.sum(local, dims, keepdim, dtype=summed) / whole, own)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _specialized(context: LocalContext) -> Callable[..., Tensor] | None:
    """Torch's own mean, where no dim that is averaged is split."""
    return None if _split(context) else context.call.func


def _split(context: LocalContext) -> bool:
    return any(isinstance(p, Partial) for p in context.output_layout().placements)


def norm_of_pieces(call: OpCall) -> Strategy | None:
    """A 2-norm without a gradient: its pieces are left alone until their norm is asked for."""
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
    pieces = Partial("norm2")
    joint = AxisStrategy((pieces,), (pieces,))
    return replace(strategy, candidates=(*strategy.candidates, joint))


def _count(call: OpCall) -> Strategy | None:
    return _reduction(call, "sum")


RULES = {
    **entries("sum", Rule("sum", _sum)),
    **entries("mean", Rule("mean", _mean)),
    **entries("nansum count_nonzero", Rule("sum", _count)),
}
