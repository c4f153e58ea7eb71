"""Converts indices of a global dim to those of this rank's shard, for reads and writes."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._layout.intervals import Interval
from vescale_dtensor._layout.local_shards import local_interval
from vescale_dtensor._planning import LocalContext


def local_index(
    index: Tensor, interval: Interval, extent: int, elsewhere: int = 0, *, wraps: bool = False
) -> tuple[Tensor, Tensor]:
    """The place of each index in this rank's shard, and a mask of those that have one.

    An index that is out of range in the global dim gets a place that is out of range on this rank
    too: torch refuses it, and does so on every rank, whatever their shards hold.

    Args:
        index: of the global dim.
        interval: the indices that this rank holds, from the first to the one behind the last.
        extent: of the global dim.
        elsewhere: the place of what other ranks hold: 0, whose result the caller masks (an empty
            shard needs one slice for it), or one behind the shard, for a slot that is dropped.
        wraps: whether negative indices count from the end.
    """
    low, high = interval
    at = torch.where(index < 0, index + extent, index) if wraps else index
    mine = (at >= low) & (at < high)
    outside = (at < 0) | (at >= extent)
    refused = max(1, high - low, elsewhere + 1)
    return torch.where(mine, at - low, torch.where(outside, refused, elsewhere)), mine


def interval_of_shard(context: LocalContext, dim: int, operand: int = 0) -> Interval | None:
    """The indices of a dim that this rank holds of an operand; None if the dim is not sharded.

    Only for dims whose letters are `contiguous_only`.
    """
    shape = tuple(context.call.operands[operand].shape)
    low, high = local_interval(context.input_layout(operand), shape, dim)
    return None if high - low == shape[dim] else (low, high)
