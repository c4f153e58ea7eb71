"""`flex_attention` of distributed tensors: its functions see global batches, heads, rows and keys.

torch's own compiles itself at once, with `fullgraph=True`, before a tensor that is more than a
local one is asked anything: there is nothing to answer for. This one has its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_dtensor._api.local_map import local_map
from vescale_dtensor._errors import LayoutError, UnsupportedError
from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import local_groups, local_interval
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard
from vescale_dtensor._ops.nn.attention_rows import rows_among
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.opmath import autocast_off, to_opmath

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_BATCH, _HEADS, _ROWS = 0, 1, 2
_LOWEST = float("-inf")


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.attention.flex_attention.flex_attention`, of DTensors as well. Collective.

    Batches, heads and rows of the query stay sharded as they are, and so does the result; keys and
    values are gathered over the axes that shard rows, and their gradients reduced and scattered.
    `score_mod` and the `mask_mod` of the block mask are called with global indices. They are
    evaluated as torch's eager mode does, for all of a rank's rows and keys, so that memory is that
    of its scores; there is a backward on CPUs, too, which torch does not have. Plain tensors are
    given to torch's function.

    Args:
        query: (batch, heads, rows, features).
        key: (batch or 1, key heads, keys, features).
        value: likewise, perhaps of other features.
        score_mod: of a score, and the indices of its batch, head, row and key. What it captures are
            plain tensors that need no gradient, the same on every rank.
        block_mask: made for the global rows and keys; its `mask_mod` says what is seen.
        scale: of scores; default: one by the root of the features.
        enable_gqa: whether groups of heads share a key head.

    Raises:
        LayoutError: shapes that do not fit, or a mask that was made for others.
        UnsupportedError: a function captures DTensors, or tensors that need a gradient.
    """
    if not any(isinstance(one, DTensor) for one in (query, key, value)):
        from torch.nn.attention.flex_attention import flex_attention as of_torch

        found: Tensor = of_torch(query, key, value, score_mod, block_mask, scale, enable_gqa)
        return found
    parts = _distributed(query, key, value)
    _require_fitting(parts, block_mask, enable_gqa)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    _require_plain(score_mod, mask_mod, parts[0])
    whole, key = parts[:2]
    rows = tuple(map(_kept, whole.placements))
    ranks = _ranks(whole, rows)
    shares = key.shape[_HEADS] % ranks == 0 == whole.shape[_HEADS] % ranks
    keys = tuple(_of_keys(one, key, whole, shares=shares) for one in rows)
    layout = Layout.of(whole.device_mesh, list(rows))
    local = partial(
        _local,
        score_mod=score_mod,
        mask_mod=mask_mod,
        scale=whole.shape[-1] ** -0.5 if scale is None else scale,
        at=_Place(layout, tuple(whole.shape), whole.shape[_HEADS] // key.shape[_HEADS], shares),
    )
    mapped = local_map(
        local,
        (rows,),
        in_placements=(rows, keys, keys),
        redistribute_inputs=True,
        out_shapes=[(*whole.shape[:-1], value.shape[-1])],
    )
    result: Tensor = mapped(*parts)
    return result


class _Place:
    """Where a rank's part of the query lies.

    Attributes:
        batch, head: its first ones.
        rows: which it has.
        group: heads for each key head.
        shares: whether key heads are sharded as those of the query are; else all are here.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], group: int, shares: bool) -> None:
        self.batch, _ = local_interval(layout, shape, _BATCH)
        self.head, _ = local_interval(layout, shape, _HEADS)
        self.rows: Intervals = rows_among(local_groups(layout, shape), layout, _ROWS)
        self.group, self.shares = group, shares


def _distributed(*tensors: Tensor) -> list[Any]:
    """Plain ones count as replicated, as everywhere."""
    mesh = next(one.device_mesh for one in tensors if isinstance(one, DTensor))
    whole = [Replicate()] * mesh.ndim
    return [
        one if isinstance(one, DTensor) else DTensor.from_local(one, mesh, whole) for one in tensors
    ]


def _require_fitting(parts: Sequence[Tensor], mask: BlockMask | None, grouped: bool) -> None:
    query, key, value = (tuple(one.shape) for one in parts)
    said = f"flex_attention of query {list(query)}, key {list(key)} and value {list(value)}"
    if not len(query) == len(key) == len(value) == 4:
        raise LayoutError(f"{said}: tensors have four dims")
    if key[:-1] != value[:-1] or query[-1] != key[-1] or key[0] not in (1, query[0]):
        raise LayoutError(
            f"{said}: batches, heads and keys of key and value, and features of query and key, "
            "have to be equal"
        )
    heads, keys = query[_HEADS], key[_HEADS]
    if heads != keys and not (grouped and keys and not heads % keys):
        raise LayoutError(f"{said}: {heads} heads and {keys} key heads; see enable_gqa")
    wanted = (query[_ROWS], key[_ROWS])
    if mask is not None and tuple(mask.seq_lengths) != wanted:
        raise LayoutError(
            f"{said}: the block mask was made for {tuple(mask.seq_lengths)} rows and keys. Make it "
            "for the global ones, on every rank"
        )


def _require_plain(score_mod: Any, mask_mod: Any, query: DTensor) -> None:
    """Call both once, on every rank, before anything is sent: ranks without rows call neither."""
    like = torch.zeros(1, 1, 1, 1, device=query.to_local().device)
    one = [torch.zeros(1, dtype=torch.int64, device=like.device)] * 4
    with torch.enable_grad(), _IndexingMode():
        for mod, scores in ((score_mod, [like]), (mask_mod, [])):
            found = None if mod is None else _each(mod, bool(scores))(*scores, *one)
            if isinstance(found, DTensor) or (found is not None and found.requires_grad):
                raise UnsupportedError(
                    f"flex_attention: {getattr(mod, '__name__', mod)} captures a DTensor or a "
                    "tensor that needs a gradient, which would be this rank's alone. Give it plain "
                    "values (x.full_tensor()), or use scaled_dot_product_attention with attn_mask"
                )


def _kept(placement: Placement) -> Placement:
    """What stays of the query's layout; all else is gathered."""
    if type(placement) is Shard and placement.dim in (_BATCH, _HEADS, _ROWS):
        return placement
    cuts = placement.cut_dims() if isinstance(placement, Sharded) else ()
    return placement if cuts == (_ROWS,) else Replicate()


def _ranks(query: DTensor, rows: Sequence[Placement]) -> int:
    sizes = [
        query.device_mesh.size(axis)
        for axis, one in enumerate(rows)
        if isinstance(one, Sharded) and one.cut_dims() == (_HEADS,)
    ]
    return torch.Size(sizes).numel()


def _of_keys(placement: Placement, key: Tensor, query: Tensor, *, shares: bool) -> Placement:
    dims = placement.cut_dims() if isinstance(placement, Sharded) else ()
    follows = (dims == (_BATCH,) and key.shape[0] == query.shape[0]) or (
        dims == (_HEADS,) and shares
    )
    return placement if follows else Replicate()


def _local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    mask_mod: Any,
    scale: float,
    at: _Place,
) -> Tensor:
    """Attention of this rank's part of the query, as torch's eager mode writes it out."""
    if at.shares:
        key, value = (one.repeat_interleave(at.group, _HEADS) for one in (key, value))
    else:
        heads = torch.arange(query.shape[_HEADS], device=query.device) + at.head
        key, value = (one.index_select(_HEADS, heads // at.group) for one in (key, value))
    with autocast_off(query.device.type):
        scores = to_opmath(query) @ to_opmath(key).transpose(-2, -1) * scale
        if scores.numel():
            scores = _modified(scores, score_mod, mask_mod, at)
        nothing = (scores == _LOWEST).all(-1, keepdim=True)
        # Softmax makes rows that see nothing NaN, and a `where` behind it would keep that in
        # backward.
        weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
        return weights.to(query.dtype) @ value.to(query.dtype)


def _modified(scores: Tensor, score_mod: Any, mask_mod: Any, at: _Place) -> Tensor:
    batch, heads, _, keys = scores.shape
    device = scores.device
    rows = [torch.arange(low, high, device=device) for low, high in at.rows]
    index = [
        torch.arange(at.batch, at.batch + batch, device=device),
        torch.arange(at.head, at.head + heads, device=device),
        torch.cat(rows),
        torch.arange(keys, device=device),
    ]
    with _IndexingMode():
        if score_mod is not None:
            scores = _each(score_mod, scored=True)(scores, *index)
        if mask_mod is not None:
            scores = scores.masked_fill(~_each(mask_mod, scored=False)(*index), _LOWEST)
    return scores


def _each(mod: Callable[..., Tensor], scored: bool) -> Callable[..., Tensor]:
    """A function of single indices, for all batches, heads, rows and keys."""
    first = (0,) if scored else ()
    for dim in (3, 2, 1, 0):
        axes = tuple(0 if one == dim else None for one in range(4))
        mod = torch.vmap(mod, in_dims=(*first, *axes))
    return mod


class _IndexingMode(TorchFunctionMode):
    """Tensors are indexed by tensors without dims as by others: vmap has no `.item()` of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer indexing by tensors; everything else is left alone."""
        if func is torch.Tensor.__getitem__ and type(args[0]) is Tensor:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(one, Tensor | int) for one in index):
                given = [torch.as_tensor(one, device=args[0].device) for one in index]
                return torch.ops.aten.index.Tensor(args[0], given)
        return func(*args, **(kwargs or {}))
