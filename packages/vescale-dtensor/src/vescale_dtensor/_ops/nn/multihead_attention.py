"""`multi_head_attention_forward` as operations that have rules: batch and heads stay sharded.

Torch merges batch and heads into one dim; here they stay two, so that each may be sharded. A
dropout mask has as many elements, in the same order, either way.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._autograd.redistribute import redistributed
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._layout.placements import InterleavedShard, Shard
from vescale_dtensor._ops.common.functions import by_name
from vescale_dtensor._tensor.dtensor import DTensor

_NAMES = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True}


@dataclass(frozen=True)
class _Heads:
    """Queries `[n, h, l, d]`, keys and values `[n, h, s, d]`, and what is added to their products.

    `mask` is broadcast to `[n, h, l, s]`; `causal` stands for one that is not written out.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool


def _forward(*args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.multi_head_attention_forward`."""
    given: dict[str, Any] = {name: None for name in _NAMES}
    given |= _DEFAULTS | by_name(_NAMES, args, kwargs)
    if not _is_covered(given):  # also where torch has to say what is wrong
        return fallback(F.multi_head_attention_forward, args, kwargs)
    batched = given["query"].ndim == 3
    heads = _heads(given if batched else _with_batch(given))
    attend = _with_weights if given["need_weights"] else _attended
    # Weights are written out only for callers that look at them: the fused op has none to give.
    found, weights = attend(heads, given)
    result = F.linear(
        found.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]
    )
    if weights is not None and given["average_attn_weights"]:
        weights = weights.mean(1)
    if batched:
        return result, weights
    return result.squeeze(1), None if weights is None else weights.squeeze(0)


def _is_covered(given: dict[str, Any]) -> bool:
    """Whether torch would take this call, and the decomposition covers it."""
    query, key, value = given["query"], given["key"], given["value"]
    if given["static_k"] is not None or given["static_v"] is not None:
        return False
    # Of global shapes: a rank without sequences of the batch takes the same path.
    if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim or not query.numel():
        return False
    embed, heads = query.shape[-1], given["num_heads"]
    if embed != given["embed_dim_to_check"] or heads < 1 or embed % heads:
        return False
    if key.shape[:-1] != value.shape[:-1] or query.shape[1:-1] != key.shape[1:-1]:
        return False
    if (given["bias_k"] is None) != (given["bias_v"] is None):
        return False
    return _weights_fit(given) and _masks_fit(given)


def _weights_fit(given: dict[str, Any]) -> bool:
    embed = given["query"].shape[-1]
    bias = given["in_proj_bias"]
    if bias is not None and tuple(bias.shape) != (3 * embed,):
        return False
    if not given["use_separate_proj_weight"]:
        packed = given["in_proj_weight"]
        alike = given["key"].shape == given["value"].shape
        return alike and packed is not None and tuple(packed.shape) == (3 * embed, embed)
    pairs = [(given[f"{n[0]}_proj_weight"], given[n]) for n in ("query", "key", "value")]
    return all(w is not None and tuple(w.shape) == (embed, x.shape[-1]) for w, x in pairs)


def _masks_fit(given: dict[str, Any]) -> bool:
    query, key = given["query"], given["key"]
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    masks = [m for m in (padding, mask) if m is not None]
    if any(m.dtype is not torch.bool and not m.is_floating_point() for m in masks):
        return False
    # Torch warns of masks of two dtypes, and refuses `is_causal` without a mask.
    if len({m.dtype for m in masks}) > 1 or (given["is_causal"] and mask is None):
        return False
    batch = tuple(query.shape[1:-1])
    length = (query.shape[0], key.shape[0])
    if padding is not None and tuple(padding.shape) != (*batch, key.shape[0]):
        return False
    stack = (given["num_heads"] * (batch[0] if batch else 1), *length)
    return mask is None or tuple(mask.shape) in (length, stack)


def _with_batch(given: dict[str, Any]) -> dict[str, Any]:
    """One sequence as a batch of one.

    One object for query, key and value stays one object: it selects the packed projection.
    """
    padding = given["key_padding_mask"]
    # By identity: two equal tensors are projected apart.
    made = {id(given[name]): given[name].unsqueeze(1) for name in ("query", "key", "value")}
    return {
        **given,
        **{name: made[id(given[name])] for name in ("query", "key", "value")},
        "key_padding_mask": None if padding is None else padding.unsqueeze(0),
    }


def _heads(given: dict[str, Any]) -> _Heads:
    """Project, append biases and zeros to keys and values, and split into heads."""
    query, key, value = _projected(given)
    batch, count = query.shape[1], given["num_heads"]
    if given["bias_k"] is not None:
        key = torch.cat([key, given["bias_k"].expand(1, batch, -1)])
        value = torch.cat([value, given["bias_v"].expand(1, batch, -1)])
    # [l, n, h d] -> [n, h, l, d]: a shard of features becomes one of heads.
    split = [
        torch.unflatten(x, -1, (count, x.shape[-1] // count)).permute(1, 2, 0, 3)
        for x in (query, key, value)
    ]
    heads = _Heads(split[0], split[1], split[2], *_mask(given, batch))
    if given["add_zero_attn"]:
        more = [F.pad(x, (0, 0, 0, 1)) for x in (heads.key, heads.value)]
        mask = None if heads.mask is None else F.pad(heads.mask, (0, 1))
        heads = replace(heads, key=more[0], value=more[1], mask=mask)
    return heads


def _projected(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given["query"], given["key"], given["value"]
    bias, embed = given["in_proj_bias"], query.shape[-1]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in ("q", "k", "v")]
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
    else:
        packed = _in_blocks(given["in_proj_weight"])
        bias = None if bias is None else _in_blocks(bias)
        # Self-attention, in one product as in torch: its input is redistributed once.
        if query is key is value:
            joint = torch.unflatten(F.linear(query, packed, bias), -1, (3, embed))
            first, second, third = joint.unbind(-2)
            return first, second, third
        weights = list(packed.chunk(3))
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
    trio = zip((query, key, value), weights, biases, strict=True)
    first, second, third = (F.linear(x, w, b) for x, w, b in trio)
    return first, second, third


def _in_blocks(packed: Any) -> Any:
    """A packed weight, resharded so that every rank has its part of query, key and value.

    `chunk` of it is then local, where the parts of a plain `Shard(0)` are on different ranks.
    """
    if not isinstance(packed, DTensor):
        return packed
    placements = packed._spec.layout.placements
    rows = [isinstance(p, Shard) and p.dim == 0 for p in placements]
    # Several axes on the rows, or none: left as they are, and `chunk` moves what it has to.
    if sum(rows) != 1:
        return packed
    blocks = InterleavedShard(0, 3)
    wanted = [blocks if on_rows else p for on_rows, p in zip(rows, placements, strict=True)]
    return redistributed(packed, packed._spec.layout.with_placements(wanted))


def _mask(given: dict[str, Any], batch: int) -> tuple[Tensor | None, bool]:
    """The additive mask of the scores, if any, and whether `is_causal` stands for it."""
    padding, mask = given["key_padding_mask"], given["attn_mask"]
    # Torch's own shortcut: `is_causal` says that the mask is the causal one, so it is not read.
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return None, True
    dtype, more = given["query"].dtype, int(given["bias_k"] is not None)
    if mask is not None:
        mask = _added(mask, dtype)
        # A stack of masks has batch and heads in one dim, here in two.
        mask = mask if mask.ndim == 2 else torch.unflatten(mask, 0, (batch, given["num_heads"]))
    if padding is not None:
        # [n, s] -> [n, 1, 1, s]: the same keys are hidden from all heads and queries.
        padding = _added(padding, dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    # Appended biases are keys that every query may look at.
    return (F.pad(mask, (0, 1)) if more and mask is not None else mask), False


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (true: left out) as numbers to add to scores."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _attended(heads: _Heads, given: dict[str, Any]) -> tuple[Tensor, None]:
    # The fused op has no `training`: it drops whatever it is told.
    share = given["dropout_p"] if given["training"] else 0.0
    mask = heads.mask
    if mask is not None and mask.ndim == 2:
        mask = mask[None, None]
    found = F.scaled_dot_product_attention(
        heads.query, heads.key, heads.value, mask, share, heads.causal
    )
    return found, None


def _with_weights(heads: _Heads, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention written out, for callers that look at its weights."""
    # Scaled before the product, as in torch: unscaled it may overflow in half precision.
    scores = (heads.query * heads.query.shape[-1] ** -0.5) @ heads.key.transpose(-2, -1)
    # Added before the softmax: minus infinity leaves a weight of exactly zero.
    if heads.mask is not None:
        scores = scores + heads.mask
    weights = scores.softmax(-1)
    if given["training"] and given["dropout_p"] > 0.0:
        weights = F.dropout(weights, given["dropout_p"])
    return weights @ heads.value, weights


HANDLERS: dict[Any, Any] = {F.multi_head_attention_forward: _forward}
