"""Searching and counting: what is sought may be cut anyhow, and so may what it is sought in.

Places in a sorted dim and counts are sums over the pieces: no rank needs another's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.execute import Run
from vescale_dtensor._layout.placements import Partial, Replicate, Shard
from vescale_dtensor._ops.common.functions import functions, in_order
from vescale_dtensor._ops.common.sharded_dim import (
    cutting,
    highest,
    lowest,
    stacked,
    with_something,
)
from vescale_dtensor._planning.op_call import Call, Reads
from vescale_dtensor._planning.plan import Rule
from vescale_dtensor._planning.strategy import Dims, Row, Signature, Strategy


def _searchsorted(call: Call) -> Strategy | None:
    """`searchsorted(sorted_sequence, input)`; a `sorter` belongs to the whole sequence."""
    if not in_order(call, "sorted_sequence input sorter"):
        return None
    sorter = call.kwargs.get("sorter") is not None
    ranks = [operand.ndim for operand in call.operands]
    among = len(ranks) - sorter > 1  # what is sought may be a number
    if not ranks[0] or (among and ranks[0] not in (1, ranks[1])) or not (among or ranks[0] == 1):
        return None
    sought: Dims = tuple(range(ranks[1])) if among else ()
    sequence: Dims = (*range(ranks[0] - 1), "s")
    inputs = (sequence, *[sought] * among, *[sequence] * sorter)
    fixed = frozenset("s") if sorter else frozenset[str]()
    return Signature(inputs, (sought,), {"s": "sum"}, fixed=fixed).strategy()


def _bucketize(call: Call) -> Strategy | None:
    """`bucketize(input, boundaries)`."""
    if not in_order(call, "input boundaries") or call.operands[-1].ndim != 1:
        return None
    sought: Dims = tuple(range(call.operands[0].ndim)) if len(call.operands) > 1 else ()
    inputs = (sought, ("s",)) if len(call.operands) > 1 else (("s",),)
    return Signature(inputs, (sought,), {"s": "sum"}).strategy()


def _isin(call: Call) -> Strategy | None:
    """`isin(elements, test_elements)`: the elements may be cut."""
    elements = call.argument(0, "elements")
    if not isinstance(elements, Tensor) or not in_order(call, "elements test_elements"):
        return None
    dims: Dims = tuple(range(elements.ndim))
    others = tuple((None,) * operand.ndim for operand in call.operands[1:])
    return Signature((dims, *others), (dims,)).strategy()


def _bincount(call: Call) -> Strategy | None:
    if any(operand.ndim != 1 for operand in call.operands) or not in_order(call, "input weights"):
        return None
    inputs: tuple[Dims, ...] = (("n",),) * len(call.operands)
    found = Signature(inputs, ((None,),), {"n": "sum"}, local=_local_bincount).strategy()
    return replace(found, unforeseen=True)


def _local_bincount(run: Run, args: Any, kwargs: Any) -> Tensor:
    layout = run.input_layout(0)
    axes = cutting(layout, (0,))
    if not axes:
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    x = tensors[0]
    top = int(stacked(with_something(x, (0,), -1).amax(), layout, axes).amax())
    least = int(run.call.argument(2, "minlength", 0))
    weights = tensors[1] if len(tensors) > 1 else None
    length = max(least, top + 1)
    if weights is not None and not len(x):  # torch forgets the weights of nothing
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
        return torch.zeros(length, dtype=kind, device=x.device)
    return torch.bincount(x, weights, length)


def _histc(call: Call) -> Strategy | None:
    """`histc(input, bins, min, max)`."""
    dims: Dims = tuple(range(call.operands[0].ndim))
    if len(call.operands) != 1 or not dims:
        return None
    return Signature((dims,), ((None,),), dict.fromkeys(dims, "sum"), local=_local_histc).strategy()


def _local_histc(run: Run, args: Any, kwargs: Any) -> Tensor:
    x: Tensor = (args[0] if args else kwargs["input"]).detach()
    layout = run.input_layout(0)
    axes = cutting(layout, range(x.ndim))
    low, high = run.call.argument(2, "min", 0), run.call.argument(3, "max", 0)
    if not axes or low != high or not run.call.operands[0].numel():
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    low, high = _extremes(run, x, axes)
    if low == high:  # as torch does where all are the same
        low, high = low - 1, high + 1
    return torch.histc(x, int(run.call.argument(1, "bins", 100)), low, high)


def _histogram(call: Call) -> Strategy | None:
    """`histogram(input, bins, range, weight, density)`: a density needs the sum of all counts."""
    x, *others = call.operands
    if call.kwargs.get("density") or not x.ndim or not in_order(call, "input bins weight"):
        return None
    dims: Dims = tuple(range(x.ndim))
    bins = isinstance(call.argument(1, "bins"), Tensor)
    weights = len(others) - bins
    if weights and tuple(others[-1].shape) != tuple(x.shape):
        return None
    inputs = (dims, *[(None,)] * bins, *[dims] * weights)
    whole = Signature(inputs, ((None,), (None,))).strategy()
    rows = [
        Row(tuple(Shard(d) if d in letters else Replicate() for letters in inputs), _COUNTS)
        for d in range(x.ndim)
    ]
    return replace(whole, rows=(whole.rows[0], *rows), local=_local_histogram)


_COUNTS = (Partial(), Replicate())


def _local_histogram(run: Run, args: Any, kwargs: Any) -> Any:
    x: Tensor = args[0] if args else kwargs["input"]
    axes = cutting(run.input_layout(0), range(x.ndim))
    bins = run.call.argument(1, "bins")
    known = isinstance(bins, Tensor) or kwargs.get("range") is not None
    if not axes or known or not run.call.operands[0].numel():
        return run.call.func(*args, **kwargs)
    low, high = _extremes(run, x, axes)
    if low == high:  # as torch does where all are the same
        low, high = low - 0.5, high + 0.5
    return run.call.func(*args, **{**kwargs, "range": (low, high)})


def _extremes(run: Run, x: Tensor, axes: tuple[int, ...]) -> tuple[float, float]:
    """The least and the largest element on any rank."""
    x, layout, dims = x.detach(), run.input_layout(0), range(x.ndim)
    low = stacked(with_something(x, dims, highest(x.dtype)).amin(), layout, axes).amin()
    high = stacked(with_something(x, dims, lowest(x.dtype)).amax(), layout, axes).amax()
    return float(low), float(high)


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **{f: Rule("search", _searchsorted, _READS) for f in functions("searchsorted")},
    **{f: Rule("search", _bucketize, _READS) for f in functions("bucketize")},
    **{f: Rule("search", _isin, _READS) for f in functions("isin")},
    **{f: Rule("counts", _bincount, _READS) for f in functions("bincount")},
    **{f: Rule("counts", _histc, _READS) for f in functions("histc")},
    **{f: Rule("counts", _histogram, _READS) for f in functions("histogram")},
}
