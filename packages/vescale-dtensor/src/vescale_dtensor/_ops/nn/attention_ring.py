"""Decides when attention of a sharded sequence runs in a ring, and runs it.

The rows of query, keys and values stay where they are; see `ring_attention` for what runs then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import vescale_rng
from torch import Tensor
from vescale_comm import group_of

from vescale_dtensor._layout.derived_placements import on_dim
from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.placements import Replicate
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._layout.shard_geometry import owned
from vescale_dtensor._ops.nn.attention_exchange import mask_share, shared_rows
from vescale_dtensor._ops.nn.attention_rows import rows_among
from vescale_dtensor._ops.nn.ring_attention import ring_attention
from vescale_dtensor._ops.nn.ring_turns import Ring
from vescale_dtensor._planning import AxisStrategy, Dims, LocalContext, OpCall
from vescale_dtensor._planning.select import axis_cost, relative_sizes
from vescale_dtensor._torch.opmath import opmath_dtype

_REPLICATE = Replicate()
# Of query, key and value: (batch, heads, rows, features).
_HEADS, _ROWS = 1, 2
# Keys and values come in forward and in backward, and their gradients go back; gathered ones come
# once. Costs are of forward and backward alike, so half of the three is what compares.
_TIMES = 1.5


def ring_candidates(
    call: OpCall, letters: Sequence[Dims], *, free: bool = False
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each mesh axis, the candidate that leaves rows of query, key and value where they are.

    Args:
        call: of query, key and value, of four dims each, and perhaps a mask.
        letters: of its operands.
        free: whether it is to be taken whatever it costs.
    """
    sizes, lies = shared_rows(call)
    ratios = relative_sizes(call.size_ratios(), [one.element_size() for one in call.operands])
    rows_of_mask = [dims.index("l") if "l" in dims else None for dims in letters[3:]]

    def candidate(axis: int) -> AxisStrategy:
        rows = lies[axis]
        masks = [_REPLICATE if dim is None else on_dim(rows, dim) for dim in rows_of_mask]
        sent = sum(axis_cost(rows, _REPLICATE, size, sizes[axis]) for size in ratios[1:3])
        # As for an exchange: what gathered keys would have a rank keep is no part of this.
        spared = ratios[0] * mask_share(call) / sizes[axis]
        bytes_ = 0.0 if free else max(0.0, _TIMES * sent - spared)
        return AxisStrategy(
            (rows, rows, rows, *masks), (rows,), fixed_placement=True, local_bytes=bytes_
        )

    return tuple((candidate(axis),) if axis in lies else () for axis in range(len(sizes)))


def in_ring(
    context: LocalContext, axes: Sequence[int], given: dict[str, Any], heads: list[int] | None
) -> Tensor:
    """Attention of the rows that this rank has, in a ring over these axes. Collective.

    Args:
        context: of the call.
        axes: those over which the rows of keys are shared.
        given: local arguments by name, in the dtype of the result.
        heads: for each local head of the query its local key head; None: groups of one size.
    """
    query = given["query"]
    keys = _used_heads(given["key"], given["value"], query.shape[_HEADS], heads)
    scale, mask, kept = given.get("scale"), given.get("attn_mask"), _DropoutMask(None, 1.0)
    if mask is not None and mask.ndim < query.ndim:
        mask = mask[(None,) * (query.ndim - mask.ndim)]
    if given.get("dropout_p", 0.0):
        kept = _drawn(context, given["dropout_p"], query)
    return ring_attention(
        query,
        *keys,
        mask,
        kept.weights,
        ring_over(context, axes),
        query.shape[-1] ** -0.5 if scale is None else scale,
        kept.boost,
    )


def ring_over(context: LocalContext, axes: Sequence[int]) -> Ring:
    """Who has which rows of the query and of keys, by the ranks that share them with this one."""
    queries, keys = (context.input_layout(index) for index in range(2))
    shapes = [tuple(one.shape) for one in context.call.operands[:2]]
    return Ring(
        group_of(queries.mesh, tuple(axes)),
        _places(queries, shapes[0], axes),
        _places(keys, shapes[1], axes),
        bool(context.call.argument(5, "is_causal", False)),
    )


def _places(layout: Layout, shape: Shape, axes: Sequence[int]) -> tuple[Intervals, ...]:
    """The rows of each rank that differs from this one in these axes, in the order of the group."""
    found = []
    for picked in product(*[range(layout.sizes[axis]) for axis in axes]):
        at = list(layout.coordinate)
        for axis, index in zip(axes, picked, strict=True):
            at[axis] = index
        found.append(rows_among(owned(layout.placements, layout.sizes, shape, at), layout, _ROWS))
    return tuple(found)


def _used_heads(
    key: Tensor, value: Tensor, heads: int, picked: list[int] | None
) -> tuple[Tensor, Tensor]:
    """The key heads that the local heads of the query need, in groups of one size."""
    if picked is None:
        return key, value
    used = sorted(set(picked))
    times = heads // max(1, len(used))
    # Only where groups are cut unevenly a key head is sent more than once.
    if picked != [head for head in used for _ in range(times)]:
        used = picked
    index = torch.tensor(used, dtype=torch.int64, device=key.device)
    return key.index_select(_HEADS, index), value.index_select(_HEADS, index)


class _DropoutMask(NamedTuple):
    """Which weights dropout keeps, as booleans, and what those are multiplied by."""

    weights: Tensor | None
    boost: float


def _drawn(context: LocalContext, rate: float, query: Tensor) -> _DropoutMask:
    """Draw the mask that one device draws for all weights, of this rank's rows."""
    shapes = [tuple(one.shape) for one in context.call.operands[:2]]
    layout, keys = context.input_layout(0).with_order(None), shapes[1][-2]
    ones = query.new_ones((*query.shape[:-1], keys), dtype=opmath_dtype(query.dtype))
    drawn = vescale_rng.dropout(ones, rate, random_layout(layout, (*shapes[0][:-1], keys), ones))
    return _DropoutMask(drawn != 0, 1 / (1 - rate) if rate < 1 else 1.0)
