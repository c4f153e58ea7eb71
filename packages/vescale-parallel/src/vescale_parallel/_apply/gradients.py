"""The gradient engine: unreduced gradients summed in few, large collectives.

The tensor layer leaves a parameter's gradient as this rank's contribution and asks here for the
totals, once per backward, when something first needs one of them.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from vescale_comm import all_reduce_bucketed, group_of
from vescale_dtensor import DTensor, RaggedShard
from vescale_dtensor.storage import PendingGradient, reduce_gradients

BUCKET_BYTES: Final = 25 * 2**20
"""Default cap of a bucket: large enough to use the wire, small enough to be a modest copy."""


class BucketedReducer:
    """Sums unreduced gradients: one all-reduce per bucket, over the axes that they are partial on.

    A bucket holds gradients of one (mesh, axes, dtype), up to `cap_bytes`; a gradient larger than
    the cap has one of its own. Half-precision gradients are added in float32.
    """

    def __init__(self, cap_bytes: int = BUCKET_BYTES) -> None:
        if cap_bytes < 1:
            raise ValueError(f"cap_bytes={cap_bytes}: a bucket holds at least one byte.")
        self.cap_bytes = cap_bytes

    def __call__(self, pending: Sequence[PendingGradient]) -> list[Tensor]:
        """The summed local gradients, in the order of `pending`."""
        # Filled by position: the tensor layer hands totals back in the order in which it asked.
        totals: list[Tensor] = [one.local for one in pending]
        # All ranks of a group see the same parameters in the same order, so they issue the same
        # collectives; which gradients are unreduced follows from layouts, never from values.
        for positions in by_group(pending):
            first = pending[positions[0]]
            summed = all_reduce_bucketed(
                [pending[position].local for position in positions],
                group_of(first.mesh, first.axes),
                order=first.order,
                cap_bytes=self.cap_bytes,
            )
            for position, total in zip(positions, summed, strict=True):
                totals[position] = total
        return totals


def by_group(pending: Sequence[PendingGradient]) -> list[list[int]]:
    """Positions of the gradients that the same ranks add up, kind after kind.

    One kind is finished before the next begins. Where buckets end depends on local extents, which
    agree among the ranks of a group but not across groups; if kinds were interleaved, two ranks
    could issue them in different orders and wait for each other.
    """
    # A dict keeps the order of the first of each kind, which is the same on all ranks.
    kinds: dict[Any, list[int]] = {}
    # Meshes by number: the hash of one is made anew each time, and mostly all have the same.
    meshes: dict[Any, int] = {}
    last, number = None, 0
    for position, one in enumerate(pending):
        if one.mesh is not last:
            last, number = one.mesh, meshes.setdefault(one.mesh, len(meshes))
        # By its device as well: with offload, some are on the host and others are not.
        kind = (number, one.axes, one.order, one.local.device.type)
        kinds.setdefault(kind, []).append(position)
    return list(kinds.values())


@cache
def reduce_before_steps() -> None:
    """From now on gradients of distributed parameters are summed before an optimizer's step.

    Not every step asks for their totals: SGD's first one with momentum copies the gradient, and its
    momentum would stay a sum over ranks that nobody has made, made anew parameter by parameter at
    each step.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = optimizer.param_groups
    stepped = [p for group in groups for p in group["params"] if isinstance(p, DTensor)]
    # What zero stores is reduced by its schedule, which may keep gradients until then. Each tuple
    # of placements is looked at once, none behind the first of zero's: this runs at every step.
    seen: set[int] = set()
    for one in stepped:
        placements = one.placements
        if id(placements) not in seen:
            seen.add(id(placements))
            # A list and not a generator: of one or two placements it is the cheaper one.
            if any([isinstance(where, RaggedShard) for where in placements]):
                return
    reduce_gradients(stepped)
