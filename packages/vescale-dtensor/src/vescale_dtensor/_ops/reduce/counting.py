"""Searching and counting: both what is searched for and what is searched in may be sharded.

Places in a sorted dim, and counts, are sums over the shards: no rank needs another's elements.
Bounds that a function takes from its input are exchanged first: all ranks need the same bins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.placements import Partial, Replicate, Shard
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._ops.common.sharded_dim import (
    ShardedDims,
    extreme_identity,
    pad_empty_dims,
    unless_refused,
    with_sharded_kernel,
)
from vescale_dtensor._planning import (
    AxisStrategy,
    Dims,
    LocalContext,
    OpCall,
    Reads,
    Rule,
    Signature,
    Strategy,
)


def _searchsorted(call: OpCall) -> Strategy | None:
    """`searchsorted(sorted_sequence, input)`; a `sorter` holds indices of the global sequence."""
    sorter = call.kwargs.get("sorter") is not None
    ranks = [operand.ndim for operand in call.operands]
    among = len(ranks) - sorter > 1  # what is sought may be a number
    if not ranks[0] or (among and ranks[0] not in (1, ranks[1])) or not (among or ranks[0] == 1):
        return None
    values = letters(ranks[1]) if among else ()
    sequence: Dims = (*range(ranks[0] - 1), "s")
    inputs = (sequence, *[values] * among, *[sequence] * sorter)
    # A place in the sequence is the sum of the places in its shards: each counts the smaller ones.
    fixed = frozenset("s") if sorter else frozenset[str]()
    return Signature(inputs, (values,), {"s": "sum"}, unshardable=fixed).strategy()


def _bucketize(call: OpCall) -> Strategy | None:
    """`bucketize(input, boundaries)`."""
    if call.operands[-1].ndim != 1:
        return None
    values = letters(call.operands[0].ndim) if len(call.operands) > 1 else ()
    inputs = (values, ("s",)) if len(call.operands) > 1 else (("s",),)
    return Signature(inputs, (values,), {"s": "sum"}).strategy()


def _isin(call: OpCall) -> Strategy | None:
    """`isin(elements, test_elements)`: the elements may be sharded."""
    elements = call.argument(0, "elements")
    if not isinstance(elements, Tensor):
        return None
    dims = letters(elements.ndim)
    # Every element is compared with all of the others, which are replicated.
    others = tuple(no_letters(operand) for operand in call.operands[1:])
    return Signature((dims, *others), (dims,), output_orders=(None,)).strategy()


def _bincount(call: OpCall) -> Strategy | None:
    x, least = call.operands[0], call.argument(2, "minlength", 0)
    if any(operand.shape != x.shape for operand in call.operands) or x.ndim != 1:
        return None
    # Torch refuses these, but not of a shard without elements: so of the global tensor.
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        return None
    if type(least) is not int or least < 0:
        return None
    inputs: tuple[Dims, ...] = (("n",),) * len(call.operands)
    found = Signature(inputs, ((None,),), {"n": "sum"}, data_dependent_shape=True).strategy()
    return with_sharded_kernel(found, (0,), _sharded_bincount)


def _sharded_bincount(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    x, *others = tensors_within((args, kwargs))
    # The length follows from the largest value on any rank: all ranks need the same shape. And all
    # have to hear of a negative one, which torch refuses: they would wait for its rank otherwise.
    bounds = torch.stack(pad_empty_dims(x.long(), (0,), 0).aminmax())
    found = ShardedDims(context, (0,)).gather(bounds)
    if int(found.amin()) < 0:
        raise RuntimeError(
            "bincount only supports 1-d non-negative integral inputs: found "
            f"{int(found.amin())}. Shift the values, or count them with unique(return_counts=True)"
        )
    weights = others[0] if others else None
    top = int(found.amax()) if context.call.operands[0].numel() else -1
    length = max(context.call.argument(2, "minlength", 0), top + 1)
    # Of no elements torch ignores the weights, and counts in integers: ranks would differ in dtype.
    if weights is not None and not len(x):
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
        return torch.zeros(length, dtype=kind, device=x.device)
    return torch.bincount(x, weights, length)


def _histc(call: OpCall) -> Strategy | None:
    """`histc(input, bins, min, max)`."""
    dims = letters(call.operands[0].ndim)
    if len(call.operands) != 1 or not dims:
        return None
    found = Signature((dims,), ((None,),), dict.fromkeys(dims, "sum")).strategy()
    return with_sharded_kernel(found, dims, _sharded_histc)


def _sharded_histc(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    x: Tensor = args[0]
    low, high = context.call.argument(2, "min", 0), context.call.argument(3, "max", 0)
    if low != high or not context.call.operands[0].numel():
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    # Also on ranks without elements: the exchange is collective, and they need the same bins.
    low, high = _extremes(context, x)
    if low == high:  # as torch widens the range of equal elements
        low, high = low - 1, high + 1
    return torch.histc(x, int(context.call.argument(1, "bins", 100)), low, high)


def _histogram(call: OpCall) -> Strategy | None:
    """`histogram(input, bins, range, weight, density)`: a density needs the sum of all counts."""
    x, *others = call.operands
    if call.kwargs.get("density") or not x.ndim:
        return None
    dims = letters(x.ndim)
    bins = isinstance(call.argument(1, "bins"), Tensor)
    weights = len(others) - bins
    if weights and tuple(others[-1].shape) != tuple(x.shape):
        return None
    inputs = (dims, *[(None,)] * bins, *[dims] * weights)
    base = Signature(inputs, ((None,), (None,))).strategy()
    rows = [
        AxisStrategy(
            tuple(Shard(d) if d in letters else Replicate() for letters in inputs), _COUNTS
        )
        for d in range(x.ndim)
    ]
    found = replace(base, candidates=(base.candidates[0], *rows))
    return with_sharded_kernel(found, dims, _sharded_histogram)


# Counts are summed over ranks; the edges of the bins are the same on all of them.
_COUNTS = (Partial(), Replicate())


def _sharded_histogram(context: LocalContext, args: Any, kwargs: Any) -> Any:
    bins = context.call.argument(1, "bins")
    # Where edges or a range are given, no rank needs to know what others hold.
    known = isinstance(bins, Tensor) or kwargs.get("range") is not None
    if known or not context.call.operands[0].numel():
        return context.call.func(*args, **kwargs)
    low, high = _extremes(context, args[0])
    if low == high:  # as torch widens the range of equal elements
        low, high = low - 0.5, high + 0.5
    return context.call.func(*args, **{**kwargs, "range": (low, high)})


def _extremes(context: LocalContext, x: Tensor) -> tuple[float, float]:
    """The smallest and the largest element of the global tensor."""
    x, dims = x.detach(), range(x.ndim)
    # Two gathers in this order on every rank. An empty shard sends the identity, which loses to
    # every element; a NaN on any rank reaches all of them, so that all refuse the range.
    every = ShardedDims(context, dims)
    padded = [
        pad_empty_dims(x, dims, extreme_identity(x.dtype, largest=one)) for one in (False, True)
    ]
    low, high = every.gather(padded[0].amin()).amin(), every.gather(padded[1].amax()).amax()
    return float(low), float(high)


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("searchsorted", Rule("search", unless_refused(_searchsorted), _READS)),
    **entries("bucketize", Rule("search", unless_refused(_bucketize), _READS)),
    **entries("isin", Rule("search", _isin, _READS)),
    **entries("bincount", Rule("counts", _bincount, _READS)),
    **entries("histc", Rule("counts", _histc, _READS)),
    **entries("histogram", Rule("counts", _histogram, _READS)),
}
