"""Ordered and compressed gradient reductions for torch's own `DistributedDataParallel`.

    from vescale_comm import ddp

    ddp.install(model, order="rank")

Nothing else changes: the same buckets, the same overlap with backward, the same `no_sync`.
"""

import operator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vescale_comm._collectives.all_reduce import all_reduce
from vescale_comm._collectives.in_place import all_reduce_
from vescale_comm._engine.handles import Pending
from vescale_comm._errors import CommArgumentError
from vescale_comm._groups.group import Group, as_group
from vescale_comm._wire.fold import Order, check_order
from vescale_comm._wire.formats import WIRES, Feedback, Wire

__all__ = ["install"]

_Future = torch.futures.Future[Tensor]


@dataclass
class _Reduction:
    """What the hook needs from one bucket to the next, and from one step to the next.

    Attributes:
        under_way: the buckets of this backward that were started: results, and whom to tell.
        residuals: of each bucket, by its index: its parameters, and their error feedback.
    """

    group: Group
    order: Order
    wire: Wire | None
    feedback: bool
    under_way: list[tuple[Pending[Tensor], _Future]] = field(default_factory=list)
    residuals: dict[int, tuple[list[Tensor], Feedback]] = field(default_factory=dict)

    def residual(self, index: int, parameters: list[Tensor]) -> Feedback:
        """The error feedback of a bucket: a new one where torch has divided the buckets anew."""
        of, kept = self.residuals.get(index, ((), None))
        same = len(of) == len(parameters) and all(map(operator.is_, of, parameters))
        if kept is None or not same:
            kept = Feedback()
            self.residuals[index] = parameters, kept
        return kept


def install(
    module: nn.Module, *, order: Order = "rank", wire: Wire | None = None, feedback: bool = False
) -> nn.Module:
    """Make DDP reduce the gradients of a module in a stated order or a wire format.

    Call it once, before the first backward, on every rank. With `order="rank"` gradients have the
    bits of one process that runs the ranks' microbatches one after the other, adds their gradients,
    and divides once by the number of ranks: on every backend, with every bucketing. With
    `order="tree"` see `vescale_comm.fsdp2.install`.

    Args:
        module: a `DistributedDataParallel`, on its own process group.
        order: as for `vescale_comm.all_reduce`.
        wire: as for `vescale_comm.all_reduce`: `"bf16"` sends half of the bytes.
        feedback: add what a wire format left out of a gradient to the next one's; needs `wire`. It
            keeps as much memory as the gradients, and no overlap with backward.

    Returns:
        `module`.

    Raises:
        CommArgumentError: it is no `DistributedDataParallel`; no such order or format; feedback
            without a format.
    """
    if not isinstance(module, DistributedDataParallel):
        raise CommArgumentError(
            f"ddp.install: a {type(module).__name__} is no DistributedDataParallel; wrap the model "
            "first (for fully_shard there is vescale_comm.fsdp2.install)"
        )
    check_order(order)
    if wire is not None and wire not in WIRES:
        known = ", ".join(map(repr, WIRES))
        raise CommArgumentError(f"ddp.install: unknown wire format {wire!r}; there are {known}")
    if feedback and wire is None:
        raise CommArgumentError("ddp.install: feedback= needs a wire format: pass wire= too")
    state = _Reduction(as_group(module.process_group), order, wire, feedback)
    module.register_comm_hook(state, _reduce)
    return module


# DDP compares these annotations with its own types; mypy knows no GradBucket.
def _reduce(state: _Reduction, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]
    """Start the reduction of one bucket; with the last of a backward, finish them all.

    DDP waits for the futures behind its last bucket, and launches buckets in one order on all
    ranks. So waiting there, in the order of the starts, costs no overlap.
    """
    buffer, done = bucket.buffer(), torch.futures.Future[Tensor]()
    # torch calls this from backward hooks, where grad mode is whatever the user's backward has.
    with torch.no_grad():
        if state.feedback:
            kept = state.residual(bucket.index(), bucket.parameters())
            done.set_result(
                all_reduce(
                    buffer, state.group, op="avg", order=state.order, wire=state.wire, feedback=kept
                )
            )
            return done
        if bucket.index() == 0:
            # Of a backward that raised before its last bucket; its gradients are of no use.
            _finish(state)
        pending = all_reduce_(
            buffer, state.group, op="avg", order=state.order, wire=state.wire, async_op=True
        )
        state.under_way.append((pending, done))
        if bucket.is_last():
            _finish(state)
    return done


def _finish(state: _Reduction) -> None:
    """Wait for what is under way, in the order of the starts, and hand DDP the results."""
    started, state.under_way = state.under_way, []
    for pending, done in started:
        done.set_result(pending.wait())
