"""Attention of some rows of the query: which rows these are, and what a causal mask shows them.

A row of the result needs its row of the query and all keys, so that sequences may be sharded over
ranks (context parallel): keys and values are gathered, and each rank holds its rows of everything
that is as large as the query, and of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._errors import UnsupportedError
from vescale_dtensor._layout.intervals import Intervals
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import local_groups
from vescale_dtensor._layout.shard_geometry import DimGroup
from vescale_dtensor._planning import LocalContext


def rows_of(context: LocalContext) -> Intervals | None:
    """The rows of the global query that this rank holds, in order; None if it holds them all."""
    layout, shape = context.input_layout(0), tuple(context.call.operands[0].shape)
    dim = len(shape) - 2
    intervals = rows_among(local_groups(layout, shape), layout, dim)
    return None if intervals == ((0, shape[dim]),) else intervals


def rows_among(groups: tuple[DimGroup, ...], layout: Layout, dim: int) -> Intervals:
    """The rows, which are dim `dim`, among what a rank owns by a layout.

    Raises:
        UnsupportedError: they are sharded as one with other dims.
    """
    for group in groups:
        if group.dims == (dim,):
            (intervals,) = group.intervals
            return intervals
    raise UnsupportedError(
        f"the rows of attention are sharded as one with other dims by {layout}; "
        "redistribute to Shard() first"
    )


def causal_mask(rows: Intervals, keys: int, device: torch.device) -> Tensor:
    """Which of the first `keys` keys each of these rows looks at; (number of rows, keys), boolean.

    Row and key count from the beginning of their sequences, as torch's `is_causal` does.
    """
    index = [torch.arange(low, high, device=device) for low, high in rows]
    none = torch.arange(0, device=device)
    return torch.cat([none, *index])[:, None] >= torch.arange(keys, device=device)


def causal(given: dict[str, Any], rows: Intervals) -> dict[str, Any]:
    """The arguments of a causal attention of these rows, with a mask in place of `is_causal`.

    Keys behind the last row are left out, since no row looks at them: half of the work, on average.
    """
    key, value = given["key"], given["value"]
    seen = min(key.shape[-2], max((end for _, end in rows), default=0))
    return given | {
        "key": key.narrow(-2, 0, seen),
        "value": value.narrow(-2, 0, seen),
        "attn_mask": causal_mask(rows, seen, key.device),
        "is_causal": False,
    }
