"""Embedding bags: bags of equal length may be sharded, and the table by features or by rows.

Where rows are sharded, every rank adds up those that it owns; the others count as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor._dispatch.execute import execute
from vescale_dtensor._dispatch.fallback import fallback
from vescale_dtensor._dispatch.one_mesh import on_one_mesh
from vescale_dtensor._dispatch.plan_cache import plan_for
from vescale_dtensor._ops.common.local_index import interval_of_shard, local_index
from vescale_dtensor._ops.nn.embedding import renormalise, unless_rows_sharded
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.plan import SeveralSpellingsError
from vescale_dtensor._torch.opmath import opmath_dtype

_ROWS, _FEATURES, _BAGS = "v", "d", "b"


def _bags(call: OpCall) -> Strategy | None:
    """`embedding_bag(input, weight, offsets=…, …)`: bags are rows, or parts of one list."""
    index, weight = call.operands[:2]
    mode = call.kwargs["mode"]
    padding = call.kwargs["padding_idx"]
    listed = call.kwargs["offsets"] is not None
    if weight.ndim != 2 or index.ndim != 2 - listed or mode not in ("sum", "mean", "max"):
        return None
    if padding is not None and not -weight.shape[0] <= padding < weight.shape[0]:
        return None
    places: Dims = (None,) if listed else (_BAGS, None)
    letters: list[Dims] = [places, (_ROWS, _FEATURES)]
    if listed:
        if call.operands[2].ndim != 1:
            return None
        letters.append((None,))
    if call.kwargs["per_sample_weights"] is not None:
        if mode != "sum" or call.operands[-1].shape != index.shape:
            return None
        letters.append(places)
    # Partial results are sums here; a maximum is none.
    fixed = {_ROWS} if mode == "max" else set()
    if call.kwargs["scale_grad_by_freq"]:
        fixed = {_ROWS, _BAGS}  # gradients are divided by how often an index is in all bags
    bags = None if listed else _BAGS  # offsets cut one list into bags: by values
    return Signature(
        tuple(letters),
        ((bags, _FEATURES),),
        {_ROWS: "sum"},
        unshardable=frozenset(fixed),
        contiguous_only=frozenset(_ROWS),
        local=_summed,
        specialize=unless_rows_sharded,
    ).strategy()


def _summed(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """What this rank's rows add to each bag; of a mean, divided by the bag's global length."""
    interval, count = interval_of_shard(context, 0, 1), context.call.operands[1].shape[0]
    if interval is None:
        return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    index, weight = args
    # An empty shard: one row of zeros, computed from the weight so that backward reaches it.
    table = weight if weight.shape[0] else weight.sum(0, keepdim=True)
    places, mine = local_index(index, interval, count)
    counted = torch.ones_like(mine)
    if kwargs["padding_idx"] is not None:
        counted = index != kwargs["padding_idx"] % count
    mine, given = mine & counted, kwargs["per_sample_weights"]
    # Row 0 stands in for what is not counted here, as padding that the kernel leaves out. (With
    # weights of 0 a NaN in it would spread.) So its own part is added by itself.
    refused = places >= table.shape[0]  # as `local_index` marks what torch has to refuse
    rest = torch.where(mine | refused, places, 0)
    total = _bag_sum(rest, table, kwargs, given, padding_idx=0)
    first = _first_row(mine & (places == 0), table, kwargs, given)
    total = total.to(first.dtype) + first
    if kwargs["mode"] == "sum":
        return total.to(weight.dtype)
    # Lengths of bags without padding. Not in half precision, in which 257 is 256.
    lengths = _count(counted, first.dtype, kwargs)
    return (total / lengths.clamp(min=1)).to(weight.dtype)


def _first_row(found: Tensor, table: Tensor, kwargs: Any, given: Tensor | None) -> Tensor:
    """What the first row adds to each bag, where `found`; in the dtype of sums."""
    wide = opmath_dtype(table.dtype)
    times = _count(found, wide, kwargs)
    shares = times if given is None else _count(found, wide, kwargs, given)
    # Chosen before it is multiplied: a NaN stays out of other bags, and out of their gradients.
    return shares * torch.where(times > 0, table[:1].to(wide), 0)


def _count(found: Tensor, dtype: torch.dtype, kwargs: Any, given: Tensor | None = None) -> Tensor:
    """How many places of each bag are `found`, as a column; or the sum of their weights."""
    # By the same kernel, which knows offsets of all kinds.
    ones = torch.ones(1, 1, dtype=dtype, device=found.device)
    weights = found.to(dtype) if given is None else torch.where(found, given, 0).to(dtype)
    return _bag_sum(torch.zeros_like(found, dtype=torch.int64), ones, kwargs, weights)


def _bag_sum(
    index: Tensor,
    table: Tensor,
    kwargs: Any,
    weights: Tensor | None,
    padding_idx: int | None = None,
) -> Tensor:
    """The sums of the bags of a call."""
    offsets = kwargs["offsets"]
    return F.embedding_bag(
        # Indices and offsets have one dtype in torch's kernel.
        index if offsets is None else index.to(offsets.dtype),
        table,
        offsets,
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=kwargs["include_last_offset"],
        padding_idx=padding_idx,
    )


_RULE = Rule("embedding_bag", _bags, Reads.NUMBERS | Reads.SHAPES)


def _bagged(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.nn.functional.embedding_bag`."""
    named: dict[str, Any] = {
        "offsets": offsets,
        "scale_grad_by_freq": scale_grad_by_freq,
        "mode": mode,
        "sparse": sparse,
        "per_sample_weights": per_sample_weights,
        "include_last_offset": include_last_offset,
        "padding_idx": padding_idx,
    }
    call = OpCall(F.embedding_bag, (input, weight), named, _RULE.reads)
    # `max_norm` changes the table, so the plan is made first: a fallback lets torch do both.
    try:
        plan = None if sparse or input.is_floating_point() else plan_for(call, _RULE)
    except SeveralSpellingsError:
        if max_norm is not None:
            renormalise(weight, input, max_norm, norm_type)
        args, rest = on_one_mesh(call, _RULE)
        return _bagged(*args, **rest)
    if plan is None:
        named |= {"max_norm": max_norm, "norm_type": norm_type}
        return fallback(F.embedding_bag, (input, weight), named)
    if max_norm is not None:
        renormalise(weight, input, max_norm, norm_type)
    return execute(plan, call)


HANDLERS: dict[Any, Callable[..., Any]] = {F.embedding_bag: _bagged}
