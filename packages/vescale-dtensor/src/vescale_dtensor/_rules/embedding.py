"""Embedding tables: split along features, or along the vocabulary with a masked look-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._execute import Run
from vescale_dtensor._layout import local_box
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules._names import functions, in_order
from vescale_dtensor._strategy import Signature, Strategy

_VOCABULARY, _FEATURE = "v", "d"


def _embedding(call: Call) -> Strategy | None:
    """`embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)`."""
    special = (call.argument(3, "max_norm"), call.argument(5, "scale_grad_by_freq", False))
    if not in_order(call, "input weight"):
        return None
    if any(special) or call.argument(6, "sparse", False) or len(call.operands) != 2:
        return None
    padding = call.argument(2, "padding_idx")
    count = call.operands[1].shape[0]
    if padding is not None and not -count <= padding < count:
        return None
    index = tuple(range(call.operands[0].ndim))
    return Signature(
        (index, (_VOCABULARY, _FEATURE)),
        ((*index, _FEATURE),),
        {_VOCABULARY: "sum"},
        linear=((1,),),
        located=frozenset(_VOCABULARY),
        local=_look_up,
        bind=_bound,
    ).strategy()


def _bound(run: Run) -> Callable[..., Tensor] | None:
    """Torch's own look-up, where every rank holds every row."""
    shape = tuple(run.call.operands[1].shape)
    (low, high), _ = local_box(run.input_layout(1), shape)
    return run.call.func if high - low == shape[0] else None


def _look_up(run: Run, args: Any, kwargs: Any) -> Tensor:
    """Rows that this rank holds, zeros for those that others do."""
    index, weight = args[0], args[1]
    shape = tuple(run.call.operands[1].shape)
    (low, high), _ = local_box(run.input_layout(1), shape)
    if high - low == shape[0]:
        return run.call.func(*args, **kwargs)  # type: ignore[no-any-return]
    if high == low:
        # Nothing is held: one row of zeros, which still hangs on the weight, so that backward runs
        # everywhere.
        weight = weight.sum(0, keepdim=True)
    padding = run.call.argument(2, "padding_idx")
    mine = (index >= low) & (index < high)
    outside = (index < 0) | (index >= shape[0])
    # An index that no rank holds is outside of the piece too: torch refuses it, on every rank.
    column = torch.where(mine, index - low, outside * weight.shape[0])
    rows = torch.nn.functional.embedding(
        column, weight, _local_padding(padding, shape[0], low, high)
    )
    return rows.masked_fill(~mine.unsqueeze(-1), 0)


def _local_padding(padding: int | None, count: int, low: int, high: int) -> int | None:
    if padding is None:
        return None
    row = padding % count
    return row - low if low <= row < high else None


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    f: Rule("embedding", _embedding, _READS) for f in functions("embedding", (torch.nn.functional,))
}
