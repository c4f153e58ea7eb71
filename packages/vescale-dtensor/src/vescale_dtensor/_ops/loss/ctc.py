"""CTC loss: sequences may be sharded; the sum over them is then partial."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._ops.common.empty_shards import pad_empty_shards
from vescale_dtensor._ops.common.functions import by_name
from vescale_dtensor._planning import Dims, LocalContext, OpCall, Reads, Rule, Signature, Strategy

_NAMES = tuple(inspect.signature(F.ctc_loss).parameters)
_BATCH = "n"


def _alignments(call: OpCall) -> Strategy | None:
    """`ctc_loss` of `[t, n, c]`, targets `[n, s]` and lengths `[n]`, all of them tensors."""
    ranks = [operand.ndim for operand in call.operands]
    if ranks != [3, 2, 1, 1]:
        return None
    reduction = call.argument(5, "reduction", "mean")
    # What an empty batch gives is left to torch.
    if reduction not in ("none", "mean", "sum") or not call.operands[0].shape[1]:
        return None
    rows: Dims = (_BATCH,)
    inputs: tuple[Dims, ...] = ((None, _BATCH, None), (_BATCH, None), rows, rows)
    kept = reduction == "none"
    each = pad_empty_shards(inputs, (rows,), _each)

    def local(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
        layout = context.input_layout(0)
        if layout.replicated == layout.active:
            return context.call.func(*args, **kwargs)  # type: ignore[no-any-return]
        # One loss per sequence first: a mean over this rank's own would weigh uneven shards alike.
        losses: Tensor = each(context, args, kwargs)
        if kept:
            return losses
        if reduction == "mean":
            *_, lengths = tensors_within((args, kwargs))
            # The mean is over the global batch, of losses per label.
            losses = losses / lengths.clamp(min=1).to(losses) / context.call.operands[0].shape[1]
        return losses.sum()

    return Signature(
        inputs, (rows if kept else (),), {} if kept else {_BATCH: "sum"}, local=local
    ).strategy()


def _each(context: LocalContext, args: Any, kwargs: Any) -> Tensor:
    """The losses of this rank's sequences."""
    loss: Tensor = context.call.func(**{**by_name(_NAMES, args, kwargs), "reduction": "none"})
    return loss


RULES = {F.ctc_loss: Rule("ctc_loss", _alignments, Reads.NUMBERS | Reads.BROADCAST_PATTERN)}
