"""Embedding tables: sharded along features, or along the vocabulary with a masked look-up.

With `max_norm` the rows that any rank looks up are renormalised first, on their owners. With
`scale_grad_by_freq` gradients are divided by how often all ranks look an index up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._autograd.conversion import full_tensor
from vescale_dtensor._dispatch.dispatch import by_rule
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import local_interval, local_shape
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._ops.common.local_index import interval_of_shard, local_index
from vescale_dtensor._ops.common.sharded_dim import (
    gather_stacked,
    pad_empty_dims,
    sharding_axes,
    straight_through,
)
from vescale_dtensor._planning import LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.opmath import opmath_dtype
from vescale_dtensor._torch.overridable import overridable

_VOCABULARY, _FEATURE = "v", "d"


def _embedding(call: OpCall) -> Strategy | None:
    """`embedding(input, weight, padding_idx)`."""
    if len(call.operands) != 2:
        return None
    padding = call.argument(2, "padding_idx")
    count = call.operands[1].shape[0]
    if padding is not None and not -count <= padding < count:
        return None
    index = letters(call.operands[0].ndim)
    return Signature(
        (index, (_VOCABULARY, _FEATURE)),
        ((*index, _FEATURE),),
        {_VOCABULARY: "sum"},
        linear=((1,),),
        contiguous_only=frozenset(_VOCABULARY),  # rows are counted from where the shard begins
        local=_look_up,
        specialize=_specialized,
    ).strategy()


def _specialized(context: LocalContext) -> Callable[..., Tensor] | None:
    """Torch's own look-up, where rows are not sharded and some are looked up."""
    index = context.call.operands[0]
    looked = local_shape(context.input_layout(0), tuple(index.shape))
    return None if 0 in looked and index.numel() else unless_rows_sharded(context)


def unless_rows_sharded(context: LocalContext) -> Callable[..., Tensor] | None:
    """Torch's own look-up, where rows are not sharded."""
    return context.call.func if interval_of_shard(context, 0, 1) is None else None


def _look_up(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """Rows that this rank has, and zeros for those of other ranks."""
    index, weight = args[0], args[1]
    interval, count = interval_of_shard(context, 0, 1), context.call.operands[1].shape[0]
    if not index.numel() and context.call.operands[0].numel():
        # Torch's second derivative of a look-up of nothing raises, and that of a selection does
        # not. No view of the weight: what comes back is new memory on the other ranks as well.
        nothing: Tensor = weight.index_select(0, index.reshape(-1))
        return nothing.reshape(*index.shape, weight.shape[1])
    if interval is None:
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    if not weight.shape[0]:
        # An empty shard: one row of zeros, computed from the weight, so that backward runs on every
        # rank.
        weight = weight.sum(0, keepdim=True)
    padding = context.call.argument(2, "padding_idx")
    # Rows of other ranks are looked up at place 0 and masked below; no rank may skip the look-up.
    places, mine = local_index(index, interval, count)
    rows = F.embedding(places, weight, _local_padding(padding, count, *interval))
    return rows.masked_fill(~mine.unsqueeze(-1), 0)


def _local_padding(padding: int | None, count: int, low: int, high: int) -> int | None:
    if padding is None:
        return None
    row = padding % count
    return row - low if low <= row < high else None


def _renorm(call: OpCall) -> Strategy | None:
    """`embedding_renorm_(weight, indices, max_norm, norm_type)`: indices are replicated."""
    if len(call.operands) != 2 or call.operands[0].ndim != 2:
        return None
    weight = (_VOCABULARY, _FEATURE)
    indices = no_letters(call.operands[1])
    return Signature(
        (weight, indices), (weight,), contiguous_only=frozenset(_VOCABULARY), local=_scale_rows
    ).strategy()


def _scale_rows(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    weight, indices = args[:2]
    most, order = context.call.argument(2, "max_norm"), context.call.argument(3, "norm_type")
    layout = context.input_layout(0)
    low, high = local_interval(layout, tuple(context.call.operands[0].shape), 0)
    return scale_rows(weight, indices, (low, high), (most, order), layout)


@overridable
def scale_rows(
    weight: Tensor,
    indices: Tensor,
    interval: tuple[int, int],
    norm: tuple[float, float],
    layout: Layout,
) -> Tensor:
    """Scale the rows of a local table that are looked up, where their norm is too large.

    Args:
        weight: the local table, which is changed and returned.
        indices: all indices of rows of the global table that any rank looks up.
        interval: this rank's rows, from the first to the one behind the last.
        norm: the largest norm allowed, and its order.
        layout: of the table.
    """
    (low, high), (most, order) = interval, norm
    # A row that is looked up twice is scaled once.
    rows = torch.unique(indices)
    rows = rows[(rows >= low) & (rows < high)] - low
    features = sharding_axes(layout, (1,))
    if not features:
        return torch.embedding_renorm_(weight, rows, most, order)
    with torch.no_grad():
        # All ranks that share these rows list them in the same order: their norms match up.
        found = weight[rows]
        # Rows without columns on this rank: the identity of the norm's reduction stands in.
        filled = pad_empty_dims(found, (1,), torch.inf if order < 0 else 0)
        gathered = gather_stacked(torch.linalg.vector_norm(filled, order, 1), layout, features)
        norms = gathered.sum(0) if order == 0 else torch.linalg.vector_norm(gathered, order, 0)
        # Torch's own formula, with its epsilon.
        scale = torch.where(norms > most, most / (norms + 1e-7), 1.0)
        weight[rows] = found * scale.unsqueeze(1)
    return weight


_READS = Reads.NUMBERS | Reads.SHAPES
_LOOK_UP = Rule("embedding", _embedding, _READS)


def _looked_up(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`torch.nn.functional.embedding`."""
    if sparse or weight.ndim != 2:
        special = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return fallback(F.embedding, (input, weight, *special), {})
    if max_norm is not None:
        renormalise(weight, input, max_norm, norm_type)
    rows = by_rule(_LOOK_UP, F.embedding, (input, weight, padding_idx), {})
    return _by_frequency(rows, input, weight) if scale_grad_by_freq else rows


def _raw(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`torch.embedding`: operands in the other order, and -1 for no padding row."""
    padding = padding_idx if 0 <= padding_idx < weight.shape[0] else None  # -1: no padding
    return _looked_up(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


def renormalise(weight: Tensor, input: Tensor, most: float, order: float) -> None:
    """Scale the rows that are looked up to a norm of at most `most`."""
    # A plain table is the same on every rank, and has to stay so: all of them see all indices.
    seen = input if isinstance(weight, DTensor) else replicated_local(input)
    with torch.no_grad():
        torch.embedding_renorm_(weight.detach(), seen, most, order)


def replicated_local(x: Tensor) -> Tensor:
    """The global value as a plain tensor."""
    return full_tensor(x) if isinstance(x, DTensor) else x


def _by_frequency(rows: Any, input: Tensor, weight: Tensor) -> Any:
    if not (torch.is_grad_enabled() and rows.requires_grad):
        return rows
    indices = replicated_local(input).flatten()
    ones = torch.ones_like(indices, dtype=opmath_dtype(rows.dtype))
    # Not `bincount`, whose length depends on values: `capture` could not replay it.
    counts = ones.new_zeros(weight.shape[0]).index_add(0, indices, ones)
    shares = F.embedding(input, counts.clamp(min=1).reciprocal().to(rows.dtype).unsqueeze(1))
    return by_rule(_STRAIGHT_THROUGH, straight_through, (rows.detach(), rows * shares), {})


def _straight_through(call: OpCall) -> Strategy:
    """`straight_through(value, follows)`: both in one layout."""
    dims = letters(call.operands[0].ndim)
    return Signature((dims, dims), (dims,), linear=((0, 1),)).strategy()


_STRAIGHT_THROUGH = Rule("carried", _straight_through, Reads.NOTHING)
RULES = entries("embedding_renorm_", Rule("embedding norms", _renorm, _READS, writes=0), (torch,))
HANDLERS: dict[Any, Callable[..., Any]] = {F.embedding: _looked_up, torch.embedding: _raw}
