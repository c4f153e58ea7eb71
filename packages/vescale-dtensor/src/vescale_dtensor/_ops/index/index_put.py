"""Writing at lists of indices: `index_put`, and with it `x[indices] = values`.

Each rank writes what falls into its shard of the indexed dims, and the rest into a slot that is
dropped. Where values are accumulated they may be sharded along with their indices: the results are
then a partial sum. A mask is turned into the indices it selects, which every rank has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._dispatch.dispatch import run_by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._ops.common.functions import both_forms, by_name, functions
from vescale_dtensor._ops.common.letters import added_letters
from vescale_dtensor._ops.common.local_index import interval_of_shard, local_index
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._ops.index.gather import broadcast_dims, common_shape
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy

_INDICES = frozenset({torch.int64, torch.int32})
_MASKS = frozenset({torch.bool, torch.uint8})

Write = Callable[[Tensor, list[Any], Tensor], Tensor]
"""Writes values into a local tensor, or a copy of it, at an index or None for each dim."""


def _index_put(call: OpCall) -> Strategy | None:
    """`index_put(input, indices, values, accumulate)` at integers."""
    _, indices, _, adds = call.args

    def write(x: Tensor, listed: list[Any], values: Tensor) -> Tensor:
        return call.func(x, tuple(listed), values, adds)  # type: ignore[no-any-return]

    return _index_put_strategy(call, list(indices), adds, write)


def _set_item(call: OpCall) -> Strategy | None:
    """`x[index] = values`, where the index has tensors of integers, and `:` for other dims."""
    given = [item if isinstance(item, Tensor) else None for item in call.args[1]]
    found = _index_put_strategy(call, given, False, _set)
    # `__setitem__` returns None: there is no result to probe for a memory order.
    return found and replace(found, output_orders=(order_of_operand(call),))


def _set(x: Tensor, listed: list[Any], values: Tensor) -> Tensor:
    x[tuple(slice(None) if item is None else item for item in listed)] = values
    return x


def _index_put_strategy(
    call: OpCall, given: list[Any], adds: bool, write: Write
) -> Strategy | None:
    """The strategy of a write at `given`, which has None for dims that are not indexed.

    `write` runs on local tensors.
    """
    x, values = call.operands[0], call.operands[-1]
    found = [item for item in given if item is not None]
    if not found or len(given) > x.ndim or any(item.dtype not in _INDICES for item in found):
        return None
    dims = [d for d, item in enumerate(given) if item is not None]
    try:
        common = common_shape([tuple(item.shape) for item in found])
    except RuntimeError:
        return None  # the fallback raises torch's error
    indices = [broadcast_dims(tuple(item.shape), common) for item in found]
    target: Dims = tuple(("v", d) if d in dims else ("x", d) for d in range(x.ndim))
    written, extents = _selection(target, tuple(x.shape), dims, common)
    # Values are broadcast to what is selected.
    source = added_letters(tuple(values.shape), written, extents)
    if source is None:
        return None
    chosen = {letter for letters in indices for letter in letters if letter is not None}
    return Signature(
        (target, *indices, source),
        (target,),
        dict.fromkeys(chosen, "sum") if adds else {},
        # A write replaces: of two ranks that write one element, none could tell which is last.
        linear=((0, len(found) + 1),) if adds else (),
        bias_operands=(0,) if adds else (),
        contiguous_only=frozenset(target[d] for d in dims),
        local=lambda run, args, _: _local(run, args[0], _spread(given, args[1]), args[2], write),
    ).strategy()


def _selection(
    target: Dims, shape: Sequence[int], dims: list[int], common: Sequence[int]
) -> tuple[Dims, tuple[int, ...]]:
    """Letters and extents of `x[indices]`: indexed dims that are not adjacent come first."""
    chosen: list[Hashable] = [("i", back) for back in range(len(common), 0, -1)]
    rest = [d for d in range(len(target)) if d not in dims]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    place = dims[0] if adjacent else 0
    letters = [target[d] for d in rest]
    extents = [shape[d] for d in rest]
    letters[place:place] = chosen
    extents[place:place] = common
    return tuple(letters), tuple(extents)


def _spread(given: list[Any], indices: Sequence[Any]) -> list[Any]:
    """The local indices, with None where the global ones have it."""
    return [None if item is None else indices[dim] for dim, item in enumerate(given)]


def _local(
    context: LocalContext, x: Tensor, listed: list[Any], values: Tensor, write: Write
) -> Tensor:
    shape = context.call.operands[0].shape
    indexed = {
        d: interval_of_shard(context, d) for d, item in enumerate(listed) if item is not None
    }
    sharded = {d: interval for d, interval in indexed.items() if interval is not None}
    if not sharded:
        return write(x, listed, values)
    # What belongs to other ranks is written to a slot behind the shard, in at least one dim, and
    # dropped. A mask of indices instead would make shapes depend on the rank.
    for d, interval in sharded.items():
        listed[d], _ = local_index(listed[d].long(), interval, shape[d], x.shape[d], wraps=True)
    # One slot behind each sharded dim; the order is that of `constant_pad_nd`, last dim first.
    slots = [n for d in reversed(range(x.ndim)) for n in (0, int(d in sharded))]
    result = write(torch.constant_pad_nd(x, slots), listed, values)
    for d in sharded:
        result = result.narrow(d, 0, x.shape[d])
    # In place, the caller's memory is written: the padded copy was another tensor.
    return x.copy_(result) if context.plan.rule.writes is not None else result


def without_masks(indices: Sequence[Any]) -> list[Any]:
    """The indices, each mask replaced by the indices that it selects, one per dim of it."""
    found: list[Any] = []
    for item in indices:
        masking = isinstance(item, Tensor) and item.dtype in _MASKS and item.ndim
        found.extend(item.nonzero(as_tuple=True) if masking else [item])
    return found


def _handler(func: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # The rule wants arguments by position, and integers in place of masks.
        named = by_name(("input", "indices", "values", "accumulate"), args, kwargs)
        if not {"indices", "values"} <= named.keys():
            return fallback(func, args, kwargs)
        indices = named["indices"]
        if any(isinstance(item, Tensor) and item.dtype in _MASKS for item in indices):
            # Checked on global shapes: a mask of the wrong extent must not fit a shard by chance.
            if not _fit(named["input"], indices):
                return fallback(func, args, kwargs)
            indices = without_masks(indices)
        adds = bool(named.get("accumulate", False))
        return run_by_rule(func, (named["input"], tuple(indices), named["values"], adds), {})

    return run


def _fit(x: Tensor, indices: Sequence[Any]) -> bool:
    """Whether every mask has the extents of the dims that it indexes."""
    dim = 0
    for item in indices:
        masking = isinstance(item, Tensor) and item.dtype in _MASKS
        count = item.ndim if masking else 1
        if masking and (not count or item.shape != x.shape[dim : dim + count]):
            return False
        dim += count
    return dim <= x.ndim


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **both_forms("index_put", Rule("index_put", _index_put, _READS)),
    torch.Tensor.__setitem__: Rule("index_put in place", _set_item, _READS, writes=0),
}
HANDLERS: dict[Any, Callable[..., Any]] = {
    func: _handler(func) for func in functions("index_put index_put_")
}
"""Functions this module answers for."""
