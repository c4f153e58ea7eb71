"""`topk` along a cut dim: the best of every rank are gathered, and the best of those are taken.

Every rank sends `k` values and indices per row, never the rows; unless they are short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._ops.common.functions import functions
from vescale_dtensor._ops.common.sharded_dim import (
    crossing,
    cutting,
    highest,
    lowest,
    stacked,
    starts,
    with_something,
)
from vescale_dtensor._ops.view.flip_pad_fft import whole
from vescale_dtensor._planning.op_call import Call, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import Dims, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


def _topk(call: Call) -> Strategy | None:
    """`topk(x, k, dim, largest, sorted)`."""
    operand = call.operands[0]
    count, dim = call.argument(1, "k"), call.argument(2, "dim", -1)
    ndim = operand.ndim
    if not all(type(n) is int for n in (count, dim)) or len(call.operands) != 1:
        return None
    if not -ndim <= dim < ndim or not 0 < count <= operand.shape[dim]:
        return None
    along, most = dim % ndim, bool(call.argument(3, "largest", True))
    dims: Dims = tuple(range(ndim))
    result: Dims = tuple(None if d == along else d for d in dims)

    def local(run: Run, args: Any, kwargs: Any) -> Any:
        if not cutting(run.input_layout(0), (along,)):
            return run.call.func(*args, **kwargs)
        return _of_all(run, args[0] if args else kwargs["input"], count, along, most)

    def bind(run: Run) -> Callable[..., Any] | None:
        return None if cutting(run.input_layout(0), (along,)) else run.call.func

    if operand.shape[along] <= _SENT * count * _pieces(operand, along):
        # Less is sent so, and torch itself decides between equals: of few experts many are.
        return whole(call, along, ("same", "same"))
    terms = (call.differentiable, False)
    return replace(crossing(dims, (result, result), (along,), terms), local=local, bind=bind)


# A value and an index of 8 bytes are sent for each of the best: so many values of 4 bytes.
_SENT = 3


def _pieces(operand: Tensor, dim: int) -> int:
    """Into how many pieces a dim is cut."""
    if not isinstance(operand, DTensor):
        return 1
    layout = operand._spec.layout
    return prod(layout.sizes[axis] for axis in cutting(layout, (dim,)))


def _of_all(run: Run, x: Tensor, count: int, dim: int, most: bool) -> Any:
    layout, extent = run.input_layout(0), run.call.operands[0].shape[dim]
    axes, begin = cutting(layout, (dim,)), starts(run)[dim]
    with torch.no_grad():
        values, indices = x.topk(min(count, x.shape[dim]), dim, most)
        missing = [0, 0] * (x.ndim - 1 - dim) + [0, count - values.shape[dim]]
        inert = (lowest if most else highest)(x.dtype)
        values = torch.constant_pad_nd(values, missing, inert)
        indices = torch.constant_pad_nd(indices + begin, missing, extent)
        values, indices = (
            stacked(part, layout, axes).movedim(0, dim).flatten(dim, dim + 1)
            for part in (values, indices)
        )
        # What only fills up comes behind what is there, also where it ties with it.
        real = torch.argsort((indices == extent).to(torch.int8), dim=dim, stable=True)
        values, indices = values.gather(dim, real), indices.gather(dim, real)
        order = torch.argsort(values, dim=dim, descending=most, stable=True)
        order = order.narrow(dim, 0, count)
        values, indices = values.gather(dim, order), indices.gather(dim, order)
    kind = torch.return_types.topk
    if not run.call.differentiable:
        return kind((values, indices))
    # Every rank's terms are what it holds of the best: their sum has the values and the gradient.
    mine = (indices >= begin) & (indices < begin + x.shape[dim])
    own = with_something(x, (dim,), 0).gather(dim, torch.where(mine, indices - begin, 0))
    return kind((torch.where(mine, own, 0), indices))


RULES = {f: Rule("topk", _topk, Reads.NUMBERS | Reads.SHAPES) for f in functions("topk")}
