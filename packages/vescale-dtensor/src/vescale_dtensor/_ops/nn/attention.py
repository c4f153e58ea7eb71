"""Scaled dot-product attention: batch, heads and the query's rows may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import vescale_rng
from torch import Tensor

from vescale_dtensor._layout.derived_placements import on_dim, split_of
from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.layout import Layout, Shape
from vescale_dtensor._layout.local_shards import local_interval, local_shape
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, Shard, is_interval
from vescale_dtensor._layout.rng_layout import random_layout
from vescale_dtensor._ops.common.functions import by_name
from vescale_dtensor._ops.common.letters import broadcast_letters
from vescale_dtensor._ops.nn.attention_checks import require_accepted
from vescale_dtensor._ops.nn.attention_exchange import exchange_attention, exchanged_axes
from vescale_dtensor._ops.nn.attention_ring import in_ring
from vescale_dtensor._ops.nn.attention_rows import causal, causal_mask, rows_of
from vescale_dtensor._ops.nn.attention_ways import SharedCandidates, shared_way
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
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import any_autocast
from vescale_dtensor._torch.opmath import autocast_off, result_dtype, to_opmath

_REPLICATE = Replicate()

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(call: OpCall) -> dict[str, Any]:
    return by_name(_NAMES, call.args, call.kwargs)


def _attention(call: OpCall) -> Strategy | None:
    given = _arguments(call)
    query, key, value = (given[name] for name in _NAMES[:3])
    require_accepted(call, given)
    mask = given.get("attn_mask")
    if len(call.operands) != 3 + (mask is not None):
        return None  # the scale may be a tensor
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        return None
    grouped = query.ndim == 4 and 1 < key.shape[1] == value.shape[1] != query.shape[1]
    lead, result = broadcast_letters([t.shape[: -2 - grouped] for t in (query, key, value)])
    # Extents of one in the query that keys broadcast:
    if given.get("dropout_p", 0.0) and None in lead[0]:
        return None  # one device draws a mask for the broadcast shape, not the query's
    heads, groups = (("h",), ("g",)) if grouped else ((), ())
    letters: list[Dims] = [
        (*lead[0], *heads, "l", "e"),
        (*lead[1], *groups, "s", "e"),
        (*lead[2], *groups, "s", "f"),
    ]
    output: Dims = (*result, *heads, "l", "f")
    if mask is not None:
        if given.get("is_causal") or not 2 <= mask.ndim <= len(output):
            return None
        names = (*output[:-1], "s")[len(output) - mask.ndim :]
        letters.append(tuple(n if mask.shape[i] != 1 else None for i, n in enumerate(names)))
    # Shapes that broadcast have rows or heads of one, which are nobody's to exchange; and without
    # heads or features there is nothing to send.
    sizes = query.shape[1] * query.shape[-1] * value.shape[-1]
    plain = query.ndim == 4 and not _broadcasts(call) and sizes > 0
    way = shared_way(call, letters) if plain else SharedCandidates((), in_ring=False)
    # Linear in the value; not declared, since dropout would have to draw one mask for all partials.
    # Grouped heads are sharded by `axis_candidates`, which keep them with their key heads.
    strategy = Signature(
        tuple(letters),
        (output,),
        unshardable=frozenset("sefhg"),
        local=_in_ring if way.in_ring else _local,
        specialize=_specialized,
    ).strategy()
    if grouped and (not given.get("enable_gqa") or query.shape[1] % key.shape[1]):
        return None  # the fallback raises torch's error on every rank
    offers = [way.candidates, _head_candidates(call, letters) if grouped else ()]
    rows = tuple(sum(each, ()) for each in zip(*filter(None, offers), strict=True))
    return replace(strategy, axis_candidates=rows) if rows else strategy


def _head_candidates(call: OpCall, letters: Sequence[Dims]) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each axis, shards of the query's heads with key heads that serve them.

    Keys are sharded by the same groups where no group is split, and replicated elsewhere: then each
    rank selects the key heads of its query heads.
    """
    query, key = call.operands[:2]
    group = query.shape[1] // key.shape[1]
    layouts = [o._spec.layout for o in call.operands if isinstance(o, DTensor)]
    sizes = layouts[0].sizes
    head_axes = [
        axis for axis in range(len(sizes)) if any(_head_shard(x.placements[axis]) for x in layouts)
    ]
    heads_of_mask = [dims.index("h") if "h" in dims else None for dims in letters[3:]]

    def row(heads: Sharded, keys: Placement) -> AxisStrategy:
        masks = [_REPLICATE if dim is None else on_dim(heads, dim) for dim in heads_of_mask]
        return AxisStrategy(
            (heads, keys, keys, *masks), (heads,), fixed_placement=True, proactive=True
        )

    rows: list[tuple[AxisStrategy, ...]] = []
    for axis, count in enumerate(sizes):
        found: list[AxisStrategy] = []
        for operand, times in ((query, 1), (key, group)) if axis in head_axes else ():
            placement = _head_shard(_placement(operand, axis))
            # `sizes` divides the global dim: where several axes shard heads, it does not tell what
            # this axis has.
            if len(head_axes) > 1 and placement is not None:
                found.append(row(Shard(1), _REPLICATE))
            elif placement is not None:
                units = tuple(times * unit for unit in placement.sizes(operand.shape[1], count))
                found.append(row(split_of(1, units), _REPLICATE))
                if not any(unit % group for unit in units):
                    groups = split_of(1, [unit // group for unit in units])
                    found.append(row(split_of(1, units), groups))
        rows.append(tuple(found))
    return tuple(rows)


def _placement(operand: Tensor, axis: int) -> Placement:
    return operand._spec.layout.placements[axis] if isinstance(operand, DTensor) else _REPLICATE


def _head_shard(placement: Placement) -> Sharded | None:
    """The shard of heads that a placement suggests: of that dim, or of it flattened with others."""
    if not isinstance(placement, Sharded) or placement.cut_dims()[0] != 1:
        return None
    return placement if is_interval(placement) else Shard(1)


def _local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    given = by_name(_NAMES, args, kwargs)
    axes = exchanged_axes(context)
    return (
        exchange_attention(context, axes, given, _of_heads) if axes else _of_heads(context, given)
    )


def _in_ring(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    given = by_name(_NAMES, args, kwargs)
    axes = exchanged_axes(context)
    if not axes:
        return _of_heads(context, given)
    _round_as_autocast(given)
    return in_ring(context, axes, given, _heads_looked_at(context))


def _of_heads(context: LocalContext, given: dict[str, Any]) -> Tensor:
    """Attention of the rows that this rank has, in the heads that it has, with all their keys."""
    picked = _heads_looked_at(context)
    if picked is not None:
        index = torch.tensor(picked, dtype=torch.int64, device=given["key"].device)
        given |= {name: given[name].index_select(1, index) for name in ("key", "value")}
        given["enable_gqa"] = False  # one key head per query head now
    rows = rows_of(context)
    if given.get("dropout_p", 0.0) != 0.0:
        return _with_dropout(context, given, rows)
    if given.get("is_causal") and rows is not None:
        given = causal(given, rows)
    result: Tensor = _without_heads(given) if _is_empty(given) else context.call.func(**given)
    if _broadcasts(context.call):
        # Where this rank holds nothing of an operand, torch gives a result the query's leading
        # dims, not the broadcast ones.
        leads = zip(*(given[name].shape[:-2] for name in _NAMES[:3]), strict=True)
        lead = tuple(next((n for n in sizes if n != 1), 1) for sizes in leads)
        if not all(lead) and tuple(result.shape[:-2]) != lead:
            result = result.expand(*lead, *result.shape[-2:])
    if _learns_mask(given) and result.numel() == 0:
        # Torch drops the mask from the graph of an empty result; its gradient is reduced on every
        # rank, so backward has to reach it.
        result = result + given["attn_mask"].sum() * 0
    return result


def _is_empty(given: dict[str, Any]) -> bool:
    return not all(given["query"].shape[:-1])


def _without_heads(given: dict[str, Any]) -> Tensor:
    """Attention where this rank holds no head, batch or row: no numbers, but a history.

    The kernel of torch 2.11 for the CPU divides by the number of heads, which ends the process.
    """
    query, key, value = _repeated_heads(given)
    # Linear and empty: any function of all three would do, as only the graph matters.
    return query @ key.transpose(-2, -1) @ value


def _specialized(context: LocalContext) -> Callable[..., Tensor] | None:
    given = _arguments(context.call)
    if not all(local_shape(context.input_layout(0), tuple(context.call.operands[0].shape))[:-1]):
        return None
    if exchanged_axes(context) or (given.get("is_causal") and rows_of(context) is not None):
        return None
    # What `_local` has to look at in each call; all else is torch's function, bound once.
    if given.get("dropout_p", 0.0) != 0.0 or _learns_mask(given) or _broadcasts(context.call):
        return None
    return context.call.func if _heads_looked_at(context) is None else None


def _broadcasts(call: OpCall) -> bool:
    """Whether leading dims differ among query, key and value, grouped heads aside."""
    # Tuples, since a slice of a `torch.Size` is made a `torch.Size` again, at ten times the cost.
    query, key, value = (tuple(operand.shape) for operand in call.operands[:3])
    if query == key == value:
        return False
    grouped = len(query) == 4 and bool(_arguments(call).get("enable_gqa"))
    end = -3 if grouped else -2
    return not query[:end] == key[:end] == value[:end]


def _learns_mask(given: dict[str, Any]) -> bool:
    mask = given.get("attn_mask")
    return mask is not None and bool(mask.requires_grad)


def _heads_looked_at(context: LocalContext) -> list[int] | None:
    """For each local query head its local key head; None where torch's own grouping is right.

    Torch divides local query heads evenly among local key heads, which fits complete groups only.
    """
    query, key = context.call.operands[:2]
    if not _arguments(context.call).get("enable_gqa") or query.ndim != 4:
        return None
    group = query.shape[1] // key.shape[1]
    first, end = local_interval(context.input_layout(0), tuple(query.shape), 1)
    low, high = local_interval(context.input_layout(1), tuple(key.shape), 1)
    if first == low * group and end == high * group:
        return None
    return [head // group - low for head in range(first, end)]


def _with_dropout(context: LocalContext, given: dict[str, Any], rows: Intervals | None) -> Tensor:
    """Attention written out, with the dropout mask that one device draws for all heads.

    In single precision at least, as torch writes it out itself; autocast rounds what goes in.
    """
    own = _round_as_autocast(given)
    given |= {name: to_opmath(given[name]) for name in _floats(given)}
    with autocast_off(given["query"].device.type):
        return _written_out(context, given, rows).to(own)


def _round_as_autocast(given: dict[str, Any]) -> torch.dtype:
    """Cast what goes in as autocast does for the fused op; returns the dtype of the result."""
    query = given["query"]
    own: torch.dtype = query.dtype
    if any_autocast():
        # Asked of a tiny one, as it would widen parts of it.
        one = torch.zeros(1, 1, 1, 1, dtype=own, device=query.device)
        own = result_dtype(F.scaled_dot_product_attention, one, one, one)
        given |= {name: given[name].to(own) for name in _floats(given)}
    return own


def _floats(given: dict[str, Any]) -> list[str]:
    return [name for name in _NAMES[:4] if _is_float(given.get(name))]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _written_out(context: LocalContext, given: dict[str, Any], rows: Intervals | None) -> Tensor:
    query, key, value = _repeated_heads(given)
    scale = given.get("scale")
    scale = max(1, query.shape[-1]) ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = causal_mask(rows or ((0, scores.shape[-2]),), scores.shape[-1], scores.device)
    if mask is not None:
        lowest = float("-inf")
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    # A row whose scores are all masked gives zeros. Softmax would make it NaN, and a `where` behind
    # it would not keep the NaN out of backward: so the scores are replaced, too.
    nothing = None if mask is None else scores.detach().isneginf().all(-1, keepdim=True)
    if nothing is not None:
        scores = scores.masked_fill(nothing, 0)
    weights = torch.softmax(scores, -1)
    if nothing is not None:
        weights = weights.masked_fill(nothing, 0)
    # By the global shape of the weights: each rank draws its own heads' part of one mask.
    layout, shape = _weights_layout(context)
    dropped = vescale_rng.dropout(
        weights, given["dropout_p"], random_layout(layout, shape, weights)
    )
    result: Tensor = dropped @ value
    return result


def _repeated_heads(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, of which the latter two have a head for each of the first."""
    query, key, value = given["query"], given["key"], given["value"]
    if given.get("enable_gqa"):
        repeats = query.shape[-3] // max(1, key.shape[-3])
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    return query, key, value


def _weights_layout(context: LocalContext) -> tuple[Layout, Shape]:
    """Layout and global shape of the attention weights: batch and heads as the query's."""
    query, key = (operand.shape for operand in context.call.operands[:2])
    return context.input_layout(0).with_order(None), (*query[:-1], key[-2])


RULES = {
    F.scaled_dot_product_attention: Rule(
        "attention", _attention, Reads.NUMBERS | Reads.SHAPES | Reads.ATTENTION_WAY
    )
}
