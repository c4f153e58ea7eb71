"""Look-ups by index: `x[indices]`, `index_select`, `gather`, `take_along_dim`.

The indexed dim may be sharded: each rank looks up what it owns, with zeros for the rest, and the
result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._layout.layout import Shape
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import broadcast_letters, drop_letter
from vescale_dtensor._ops.common.local_index import interval_of_shard, local_index
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.common.sharded_dim import pad_empty_dims
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy

_INDICES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _local_places(
    context: LocalContext, index: Tensor, dim: int, *, wraps: bool
) -> tuple[Tensor, Tensor | None]:
    """The index into the shard of operand 0, and where it has a place; None: everywhere."""
    interval = interval_of_shard(context, dim)
    if interval is None:
        return index, None
    extent = context.call.operands[0].shape[dim]
    return local_index(index.long(), interval, extent, wraps=wraps)


def lookup_strategy(call: OpCall, items: list[Any], shape: Shape) -> Strategy | None:
    """`x[items]`, where items are integer tensors or lists of numbers, or take all of a dim."""
    spread = spread_out(items, len(shape))
    if spread is None or any(not _is_lookup(item) and item != slice(None) for item in spread):
        return None
    dims = [d for d, item in enumerate(spread) if _is_lookup(item)]
    if not dims or call.operands[0] is not call.args[0]:
        return None
    if len(dims) > 1 and any(isinstance(spread[d], Tensor) and not spread[d].ndim for d in dims):
        return None  # torch takes it for a number, which changes where the indexed dims go
    return _indexing(call, spread, dims)


def spread_out(items: Sequence[Any], ndim: int) -> list[Any] | None:
    """The items of an index with its ellipsis, or its missing end, written out.

    None where they do not fit so many dims: what is wrong with them, torch says.
    """
    used = sum(dims_taken(item) for item in items)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if used > ndim or len(dots) > 1:
        return None
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (ndim - used), *items[at + 1 :]]


def dims_taken(item: Any) -> int:
    """How many dims an item of an index takes; a mask takes all of its own."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else 1


def _is_lookup(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype in _INDICES and _picks(item.dtype)
    return isinstance(item, list) and all(type(i) is int for i in item) and bool(item)


@cache
def _picks(dtype: torch.dtype) -> bool:
    """Whether this version of torch indexes with such integers."""
    try:
        torch.zeros(1, device="cpu")[torch.zeros(1, dtype=dtype, device="cpu")]
    except (RuntimeError, IndexError):
        return False
    return True


def _indexing(call: OpCall, spread: list[Any], dims: list[int]) -> Strategy | None:
    found = [spread[d] for d in dims]
    shapes = [tuple(i.shape) if isinstance(i, Tensor) else (len(i),) for i in found]
    try:
        common = common_shape(shapes)
    except RuntimeError:
        return None
    # Lists are no operands and have no letters: what they alone span is replicated in the result.
    lettered = [broadcast_dims(s, common) for s in shapes]
    table: Dims = tuple(("v", d) if d in dims else ("x", d) for d in range(len(spread)))
    pairs = list(zip(found, lettered, strict=True))
    # Every rank has the whole of a list: what is looked up together with it is no shard.
    whole = {letter for i, n in pairs if not isinstance(i, Tensor) for letter in n}
    tensors = [
        tuple([None if letter in whole else letter for letter in n])
        for i, n in pairs
        if isinstance(i, Tensor)
    ]
    known = {letter for letters in tensors for letter in letters}
    result = tuple(n if n in known else None for n in broadcast_dims(common, common))
    # NumPy's rule: indexed dims stay in place if they are adjacent, else they come first.
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    place = dims[0] if adjacent else 0
    rest = [letter for d, letter in enumerate(table) if d not in dims]
    output: Dims = (*rest[:place], *result, *rest[place:])

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        given = args[1] if isinstance(args[1], tuple) else (args[1],)
        # The local indices: those of tensors may be shards of the ones that were planned with.
        feed = iter([item for item in given if _is_lookup(item)])
        return _local_indexing(context, args[0], [next(feed) for _ in dims], dims, place)

    inputs = (table, *tensors)
    strategy = _signature(inputs, output, [table[d] for d in dims], local)
    # The result's memory order follows from the strides of the operands. Kernels are asked for it:
    # without data torch predicts another one for some tensors with dims of one element.
    ordered = any(order_of_operand(call, i) for i in range(len(call.operands)))
    return replace(strategy, probe_order="zeros") if ordered else strategy


def common_shape(shapes: Sequence[Shape]) -> Shape:
    """The shape that indices are broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def broadcast_dims(shape: Shape, common: Shape) -> tuple[Hashable | None, ...]:
    """Letters of an index, counted from the right; None where it is broadcast."""
    letters = []
    for back in range(len(shape), 0, -1):
        stretched = shape[-back] == 1 != common[-back]
        letters.append(None if stretched else ("i", back))
    return tuple(letters)


def _signature(
    inputs: tuple[Dims, ...], output: Dims, index_dims: list[Any], local: Any
) -> Strategy:
    return Signature(
        inputs,
        (output,),
        dict.fromkeys(index_dims, "sum"),
        linear=((0,),),
        contiguous_only=frozenset(index_dims),  # places are counted from where the shard begins
        local=local,
    ).strategy()


def _local_indexing(
    context: LocalContext, x: Tensor, indices: list[Any], dims: list[int], place: int
) -> Tensor:
    tensors = [i if isinstance(i, Tensor) else torch.tensor(i, device=x.device) for i in indices]
    found = [_local_places(context, i, d, wraps=True) for i, d in zip(tensors, dims, strict=True)]
    at = [places for places, _ in found]
    masks = [mine for _, mine in found if mine is not None]
    if not masks:
        return context.call.func(x, _index_of(x, dims, at))  # type: ignore[no-any-return]
    # Only sharded dims are padded: of a dim that is empty globally, torch refuses every index.
    sharded = [d for d, (_, mine) in zip(dims, found, strict=True) if mine is not None]
    result = context.call.func(pad_empty_dims(x, sharded, 0), _index_of(x, dims, at))
    # An element is on this rank if its index is in each dim. Others were looked up at some valid
    # place, and are masked.
    mine = reduce(torch.logical_and, masks)
    mine = torch.broadcast_to(mine, common_shape([tuple(i.shape) for i in at]))
    # The mask covers the indexed dims; dims of the table behind them are used in full.
    mask = mine.reshape((*mine.shape, *(1,) * (result.ndim - place - mine.ndim)))
    return result.masked_fill(~mask, 0)  # type: ignore[no-any-return]


def _index_of(x: Tensor, dims: list[int], indices: list[Tensor]) -> tuple[Any, ...]:
    by_dim = dict(zip(dims, indices, strict=True))
    return tuple(by_dim.get(d, slice(None)) for d in range(x.ndim))


def _index_select(call: OpCall) -> Strategy | None:
    """`index_select(input, dim, index)`."""
    if len(call.operands) != 2:
        return None
    table, index = call.operands
    dim = call.dim(1)
    if index.ndim != 1 or dim is None:
        return None
    letters: Dims = tuple(("v", d) if d == dim else ("x", d) for d in range(table.ndim))
    output = (*letters[:dim], "i", *letters[dim + 1 :])

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        x, at = tensors_within((args, kwargs))
        found, mine = _local_places(context, at, dim, wraps=False)
        table = pad_empty_dims(x, (dim,), 0) if mine is not None else x
        result = torch.index_select(table, dim, found.to(at.dtype))  # torch knows which it takes
        # Not sharded along the dim: torch's result is complete, and nothing is masked.
        if mine is None:
            return result
        return result.masked_fill(~mine.view(-1, *(1,) * (x.ndim - 1 - dim)), 0)

    return _signature((letters, ("i",)), output, [letters[dim]], local)


def _gather(call: OpCall) -> Strategy | None:
    """`gather(input, dim, index)`."""
    if call.argument(3, "sparse_grad", False):
        return None  # a sparse gradient cannot be a DTensor
    return _lookup_along(call, call.dim(1))


def _take_along(call: OpCall) -> Strategy | None:
    """`take_along_dim(input, indices, dim)`: without a dim it flattens, else it broadcasts."""
    if len(call.operands) != 2:
        return None
    table, index = (tuple(operand.shape) for operand in call.operands)
    dim = call.dim(2)
    if call.argument(2, "dim") is None:
        along: Dims = ("i",) if len(index) == 1 else (None,) * len(index)
        everything: Dims = (None,) * len(table)
        return Signature((everything, along), (along if len(index) == 1 else (None,),)).strategy()
    if dim is not None and not _are_alike(table, index, dim):
        return _broadcast_along(call, dim)
    return _lookup_along(call, dim, wraps=_takes(-1), modulo=_takes(1))


def _are_alike(table: Shape, index: Shape, dim: int) -> bool:
    """Whether nothing has to be broadcast, or the shapes do not fit at all."""
    pairs = enumerate(zip(table, index, strict=False))
    return len(table) != len(index) or all(a == b for d, (a, b) in pairs if d != dim)


def _broadcast_along(call: OpCall, dim: int) -> Strategy | None:
    """`take_along_dim` where extents of one are broadcast; the dim itself is not sharded."""
    (first, second), output = broadcast_letters(call.shapes())
    table: Dims = drop_letter(first, dim)
    index: Dims = tuple("i" if d == dim else d for d in second)
    result: Dims = tuple("i" if d == dim else d for d in output)
    return Signature((table, index), (result,), linear=((0,),)).strategy()


@cache
def _index_dtypes() -> frozenset[torch.dtype]:
    """The dtypes of indices that this version's `gather` takes."""
    try:
        torch.gather(
            torch.zeros(1, device="cpu"), 0, torch.zeros(1, dtype=torch.int32, device="cpu")
        )
    except (RuntimeError, IndexError):
        return frozenset({torch.int64})
    return frozenset({torch.int64, torch.int32})


@cache
def _takes(index: int) -> bool:
    """Whether this version's `take_along_dim` takes such an index of a dim of extent 1."""
    try:
        torch.take_along_dim(torch.zeros(1, device="cpu"), torch.tensor([index], device="cpu"), 0)
    except (RuntimeError, IndexError):
        return False
    return True


def _lookup_along(
    call: OpCall, dim: int | None, *, wraps: bool = False, modulo: bool = False
) -> Strategy | None:
    """`gather`, and `take_along_dim`, which torch lets take any index modulo the extent."""
    if len(call.operands) != 2 or dim is None:
        return None
    table, index = call.operands
    if index.ndim != table.ndim or index.dtype not in _index_dtypes():
        return None
    # `gather` lets an index be shorter than the table: such dims do not shard alike.
    shared = [d for d in range(table.ndim) if d != dim and table.shape[d] == index.shape[d]]
    first: Dims = tuple("v" if d == dim else d if d in shared else None for d in range(table.ndim))
    second: Dims = tuple("i" if d == dim else d if d in shared else None for d in range(table.ndim))

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        x, at = tensors_within((args, kwargs))
        at = at.remainder(max(1, table.shape[dim])) if modulo else at
        found, mine = _local_places(context, at, dim, wraps=wraps)
        if mine is None and wraps:
            return torch.take_along_dim(x, at, dim)
        if mine is None:
            return torch.gather(x, dim, found)
        return torch.gather(pad_empty_dims(x, (dim,), 0), dim, found).masked_fill(~mine, 0)

    return _signature((first, second), second, ["v"], local)


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **entries("index_select", Rule("lookup", _index_select, _READS)),
    **entries("gather", Rule("lookup", _gather, _READS)),
    **entries("take_along_dim", Rule("lookup", _take_along, _READS)),
}
