"""Writing by index: `scatter`, `index_add` and their kin, out of place and in place.

Dims that are not indexed may be sharded for all operands alike. Where the indexed dim of the target
is sharded, each rank writes what falls into its shard, and the rest into a slot that is dropped.
Where values are only added, the source may be sharded along the index: the result is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._ops.common.functions import both_forms, functions
from vescale_dtensor._ops.common.local_index import interval_of_shard, local_index
from vescale_dtensor._ops.common.sharded_dim import pad_dim
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy

_ADDING = frozenset(functions("scatter_add scatter_add_ index_add index_add_"))


def _strategy(
    letters: Callable[[OpCall, int], tuple[Dims, ...] | None], wraps: bool = False
) -> Any:
    """The strategy of `func(target, dim, index, source)`, given the letters of the operands.

    Args:
        letters: `v` is the indexed dim of the target, `i` the dim of the index, others are dims.
        wraps: whether negative indices count from the end.
    """

    def strategy(call: OpCall) -> Strategy | None:
        dim = call.dim(1)
        if dim is None or len(call.operands) < 2:
            return None
        if call.operands[1].dtype not in (torch.int64, torch.int32):
            return None
        inputs = letters(call, dim)
        if inputs is None:
            return None
        # Only sums may be spread over ranks that each have a part of the source.
        adds = call.func in _ADDING or _reduction(call) == "sum"
        linear = ((0, 2),) if adds and len(inputs) == 3 else ()

        def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
            return _local(context, dim, args, kwargs, wraps)

        return Signature(
            inputs,
            (inputs[0],),
            {"i": "sum"} if adds else {},
            linear=linear,
            bias_operands=(0,) if adds else (),
            contiguous_only=frozenset("v"),
            local=local,
        ).strategy()

    return strategy


def _reduction(call: OpCall) -> str | None:
    """The reduction of `scatter_reduce` with `include_self`; None of other functions.

    Without `include_self` the first write replaces: contributions of ranks could not be summed.
    """
    if not call.func.__name__.startswith("scatter_reduce"):
        return None
    kept = call.kwargs.get("include_self", True)
    return call.argument(4, "reduce") if kept is True else None


def _along_dim(call: OpCall, dim: int) -> tuple[Dims, ...] | None:
    """`scatter`: an index as large as what is written; extents may differ from the target's."""
    shapes = call.shapes()
    ndim = len(shapes[0])
    if len(shapes[1]) != ndim or any(len(s) not in (0, ndim) for s in shapes[2:]):
        return None
    full = [s for s in shapes if len(s) == ndim]
    # Where extents differ, torch uses the first indices of the longer ones: not sharded.
    shared = {d for d in range(ndim) if d != dim and len({s[d] for s in full}) == 1}
    target: Dims = tuple("v" if d == dim else d if d in shared else None for d in range(ndim))
    index: Dims = tuple("i" if d == dim else letter for d, letter in enumerate(target))
    found = [target, index]
    for shape in shapes[2:]:
        same = len(shape) == ndim and shape[dim] == shapes[1][dim]
        source = index if same else tuple(None if n == "i" else n for n in index)
        found.append(source if len(shape) == ndim else ())
        if len(shape) == ndim and not same:
            # Torch reads the first slices of a longer source: neither may be sharded along it.
            found[1] = source
    return tuple(found)


def _rows(call: OpCall, dim: int) -> tuple[Dims, ...] | None:
    """`index_add`: a vector of indices, and slices to write; or one value."""
    shapes = call.shapes()
    ndim = len(shapes[0])
    if len(shapes[1]) != 1 or any(len(s) not in (0, ndim) for s in shapes[2:]):
        return None
    target: Dims = tuple("v" if d == dim else d for d in range(ndim))
    source: Dims = tuple("i" if d == dim else d for d in range(ndim))
    others = [source if len(s) == ndim else () for s in shapes[2:]]
    return (target, ("i",), *others)


def _local(context: LocalContext, dim: int, args: Any, kwargs: Any, wraps: bool) -> Tensor:
    """The call on this rank's shard of the target, with a slot behind it for all other indices."""
    func = context.call.func
    interval = interval_of_shard(context, dim)
    if interval is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    x, given, *_ = tensors_within((args, kwargs))
    slot, extent = x.shape[dim], context.call.operands[0].shape[dim]
    # What other ranks hold goes to the slot, and what no rank may write is refused by every rank.
    found, _ = local_index(given.long(), interval, extent, slot, wraps=wraps)
    found = found.to(given.dtype)  # torch says which dtypes it takes
    with_slot = pad_dim(x, dim, 1)

    # By identity: `==` would compare elements.
    def swapped(value: Any) -> Any:
        return with_slot if value is x else found if value is given else value

    named = {name: swapped(value) for name, value in kwargs.items()}
    result = func(*map(swapped, args), **named).narrow(dim, 0, slot)
    if context.plan.rule.writes is not None:
        return x.copy_(result)  # what was written is the padded copy
    return result  # type: ignore[no-any-return]


_SCATTERS = "scatter scatter_add scatter_reduce"
_INDEXED = "index_add index_copy index_reduce"
_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **both_forms(_SCATTERS, Rule("scatter", _strategy(_along_dim), _READS)),
    **both_forms(_INDEXED, Rule("scatter", _strategy(_rows), _READS)),
    **both_forms("index_fill", Rule("scatter", _strategy(_rows, wraps=True), _READS)),
}
