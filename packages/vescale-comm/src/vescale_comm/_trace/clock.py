"""Compare this rank's clock with rank 0's, so that their traces share one time axis."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from vescale_comm._groups.connection import barrier_devices
from vescale_comm._groups.group import as_group
from vescale_comm._torch.own_calls import own_calls

_ROUNDS = 5


def aligned_clock() -> tuple[int, int]:
    """Return this rank's clock and rank 0's, in ns, at one moment of the default process group.

    Rank 0 sends its time some rounds; the message that was fastest is off by least.
    """
    # An outer trace does not miss it.
    with own_calls(as_group().process_group):
        return _compared_clock(as_group().backends)


def _compared_clock(backends: Mapping[str, str]) -> tuple[int, int]:
    device = _message_device(backends)
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        # So that no rank is late: what a receiver waits for would count as difference of the
        # clocks.
        dist.barrier(device_ids=barrier_devices(backends))
        sent = torch.tensor([time.time_ns()], dtype=torch.int64, device=device)
        dist.broadcast(sent, 0)
        # Read before the clock is: an accelerator's broadcast returns before it has arrived.
        zero = int(sent.item())
        pair = (time.time_ns(), zero)
        # The difference is the clocks' plus the way of the message, so the smallest is nearest.
        if best is None or pair[0] - pair[1] < best[0] - best[1]:
            best = pair
    assert best is not None
    # Rank 0 is its own reference: how long its own broadcast took is no difference of clocks.
    return (best[1], best[1]) if dist.get_rank() == 0 else best


def _message_device(backends: Mapping[str, str]) -> str:
    """Return a device that a group sends from: the CPU where it can, as gloo does and NCCL not."""
    # A group of NCCL alone has one entry, that of its accelerator.
    return "cpu" if "cpu" in backends else next(iter(backends), "cpu")
