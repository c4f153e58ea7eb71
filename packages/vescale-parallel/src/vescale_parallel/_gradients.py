"""The gradient engine: unfinished gradients summed in few, large collectives.

The tensor layer leaves a parameter's gradient as this rank's contribution and asks here for the
totals, once per backward, when something first needs one of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from vescale_comm import all_reduce, group_of
from vescale_dtensor import PendingGradient, set_gradient_reducer

BUCKET_BYTES: Final = 25 * 2**20
"""Default cap of a bucket: large enough to use the wire, small enough to be a modest copy."""


class BucketedReducer:
    """Sums unfinished gradients: one all-reduce per bucket, over the axes that owe the sum.

    Gradients are grouped by (mesh, axes, dtype) in list order, and a group is cut where it would
    exceed `cap_bytes`; a gradient larger than the cap has a bucket of its own.
    """

    def __init__(self, cap_bytes: int = BUCKET_BYTES) -> None:
        if cap_bytes < 1:
            raise ValueError(f"cap_bytes={cap_bytes}: a bucket holds at least one byte.")
        self.cap_bytes = cap_bytes

    def __call__(self, pending: Sequence[PendingGradient]) -> list[Tensor]:
        """The summed local gradients, in the order of `pending`."""
        totals: list[Tensor] = [one.local for one in pending]
        for bucket in plan_buckets(pending, self.cap_bytes):
            group = group_of(pending[bucket[0]].mesh, pending[bucket[0]].axes)
            flat = torch.cat([pending[position].local.reshape(-1) for position in bucket])
            pieces = torch.split(all_reduce(flat, group), [totals[p].numel() for p in bucket])
            for position, piece in zip(bucket, pieces, strict=True):
                totals[position] = piece.view(totals[position].shape)
        return totals


def plan_buckets(pending: Sequence[PendingGradient], cap_bytes: int) -> list[tuple[int, ...]]:
    """Positions in `pending` that share one collective, in the order the collectives are issued.

    All buckets of one (mesh, axes) come before those of the next. Cuts depend on local extents,
    which agree within the group that sums them but not across groups; if kinds were interleaved,
    two ranks could issue them in different orders and wait for each other.
    """
    kinds: dict[Any, list[int]] = {}
    for position, one in enumerate(pending):
        kinds.setdefault((one.mesh, tuple(one.axes), one.local.dtype), []).append(position)
    return [bucket for kind in kinds.values() for bucket in _cut(kind, pending, cap_bytes)]


def _cut(
    positions: Sequence[int], pending: Sequence[PendingGradient], cap_bytes: int
) -> list[tuple[int, ...]]:
    """Split positions of one kind where a bucket would exceed the cap."""
    buckets: list[list[int]] = []
    room = 0
    for position in positions:
        local = pending[position].local
        size = local.numel() * local.element_size()
        if not buckets or size > room:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(position)
        room -= size
    return [tuple(bucket) for bucket in buckets]


def install_reducer(parameters: Iterable[nn.Parameter], cap_bytes: int = BUCKET_BYTES) -> None:
    """Let a `BucketedReducer` finish the gradients of these parameters."""
    set_gradient_reducer(list(parameters), BucketedReducer(cap_bytes))
