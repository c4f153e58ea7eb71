"""Scaled dot-product attention: batch and heads may be split, also grouped-query heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import vescale_rng
from torch import Tensor

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._drawing import random_layout
from vescale_dtensor._execute import Run
from vescale_dtensor._layout import Layout, Shape
from vescale_dtensor._plan import Rule
from vescale_dtensor._strategy import Dims, Signature, Strategy
from vescale_dtensor._tensor import DTensor

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _arguments(call: Call) -> dict[str, Any]:
    given = dict(zip(_NAMES, call.args, strict=False))
    return {**given, **call.kwargs}


def _attention(call: Call) -> Strategy | None:
    given = _arguments(call)
    query, key = given["query"], given["key"]
    if any(t.ndim != 4 for t in (query, key, given["value"])):
        return None
    heads_fixed = query.shape[1] != key.shape[1] and not _groups_align(call, query, key)
    letters: list[Dims] = [("b", "h", "l", "e"), ("b", "h", "s", "e"), ("b", "h", "s", "f")]
    if given.get("attn_mask") is not None:
        letters.append(_mask_letters(given["attn_mask"], query))
    fixed = frozenset("lsef") | (frozenset("h") if heads_fixed else frozenset())
    # The value is linear in itself, but a dropout mask must not differ between terms: no partials.
    return Signature(
        tuple(letters), (("b", "h", "l", "f"),), fixed=fixed, local=_local, bind=_bound
    ).strategy()


def _groups_align(call: Call, query: Tensor, key: Tensor) -> bool:
    """Whether cutting heads evenly keeps every query head with its key head, on all axes."""
    sizes = 1
    for operand in call.operands:
        if isinstance(operand, DTensor):
            layout = operand._spec.layout
            sizes = math.prod(layout.sizes)
            break
    return key.shape[1] % sizes == 0 and query.shape[1] % key.shape[1] == 0


def _mask_letters(mask: Tensor, query: Tensor) -> Dims:
    names = ("b", "h", "l", "s")[4 - mask.ndim :]
    return tuple(name if mask.shape[i] != 1 else None for i, name in enumerate(names))


def _local(run: Run, args: Any, kwargs: Any) -> Tensor:
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    if given.get("dropout_p", 0.0) == 0.0:
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    return _with_dropout(run, given)


def _bound(run: Run) -> Callable[..., Tensor] | None:
    dropped: float = _arguments(run.call).get("dropout_p", 0.0)
    return run.call.func if dropped == 0.0 else None


def _with_dropout(run: Run, given: dict[str, Any]) -> Tensor:
    """Attention written out, with the dropout mask that one device draws for all heads."""
    query, key, value = given["query"], given["key"], given["value"]
    if given.get("enable_gqa"):
        repeats = query.shape[1] // max(1, key.shape[1])
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        lowest = float("-inf")
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    layout, shape = _weights_layout(run)
    dropped = vescale_rng.dropout(
        weights, given["dropout_p"], random_layout(layout, shape, weights)
    )
    result: Tensor = dropped @ value
    return result


def _weights_layout(run: Run) -> tuple[Layout, Shape]:
    """Layout and global shape of the attention weights: batch and heads as the query's."""
    query, key = (operand.shape for operand in run.call.operands[:2])
    return run.input_layout(0).with_order(None), (*query[:3], key[2])


RULES = {
    F.scaled_dot_product_attention: Rule("attention", _attention, Reads.NUMBERS | Reads.SHAPES)
}
