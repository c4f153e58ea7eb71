"""Signals and segments: batches, and dims that are not scanned, may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._ops.common.empty_shards import pads_empty
from vescale_dtensor._ops.common.functions import entries
from vescale_dtensor._ops.common.letters import letters, no_letters
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy
from vescale_dtensor._planning.op_call import wrap_dim


def _transform(call: OpCall) -> Strategy | None:
    """`stft` and `istft`: a batch of signals may be sharded; the window is replicated."""
    inverse = call.func.__name__ == "istft"
    x = call.operands[0]
    complex_in = x.is_complex()
    core = (2 if complex_in else 3) if inverse else 1
    if x.ndim not in (core, core + 1) or len(call.operands) > 2:
        return None
    batch: Dims = (0,) * (x.ndim - core)
    if inverse:
        added_dims = 1
    else:
        # By default, torch returns complex numbers for a complex signal or window only.
        asked = call.kwargs.get("return_complex")
        complex_out = any(o.is_complex() for o in call.operands) if asked is None else asked
        added_dims = 2 if complex_out else 3
    # Each signal needs the full window, on whatever rank it is.
    window = [no_letters(operand) for operand in call.operands[1:]]
    inputs = ((*batch, *(None,) * core), *window)
    outputs: tuple[Dims, ...] = ((*batch, *(None,) * added_dims),)
    return pads_empty(Signature(inputs, outputs, probe_order="meta")).strategy()


def _segments(call: OpCall) -> Strategy | None:
    """`segment_reduce(data, reduce, lengths, …, axis)`: dims behind `axis` may be sharded."""
    data, axis = call.operands[0], call.argument(5, "axis", 0)
    count = len(call.operands)
    if count != 2 or type(axis) is not int or not 0 <= axis < data.ndim:
        return None
    if call.operands[1].ndim != axis + 1:
        return None
    # Not leading dims, though each row has its own segments: torch has no minimum of no rows.
    front, rest = (None,) * (axis + 1), tuple(range(axis + 1, data.ndim))
    return Signature(((*front, *rest), front), ((*front, *rest),)).strategy()


def _slopes(call: OpCall) -> Strategy | None:
    """`gradient(input, spacing, dim, edge_order)`: dims that are differentiated are not sharded."""
    x, dim = call.operands[0], call.argument(2, "dim")
    spacing = call.argument(1, "spacing")
    if isinstance(spacing, Tensor) or not x.ndim:
        return None
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    unsharded = {wrap_dim(d, x.ndim) for d in dims}
    if None in unsharded:
        return None
    # A difference at the edge of a shard would need the neighbour's elements.
    operand = letters(x.ndim, unsharded)
    places = [no_letters(operand) for operand in call.operands[1:]]
    return Signature((operand, *places), (operand,), linear=((0,),), local=_call_local).strategy()


def _call_local(context: LocalContext, args: Any, kwargs: Any) -> Any:
    return context.call.func(*args, **kwargs)


_READS = Reads.NUMBERS | Reads.SHAPES
_PLACES = (torch, torch.Tensor, torch.functional)
RULES = {
    **entries("stft istft", Rule("stft", _transform, _READS), _PLACES),
    **entries("segment_reduce", Rule("segment_reduce", _segments, _READS), _PLACES),
    **entries("gradient", Rule("gradient", _slopes, _READS), _PLACES),
}
