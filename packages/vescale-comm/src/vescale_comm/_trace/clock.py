"""The clocks of the ranks, so that their traces can be laid beside each other."""

import time

import torch
import torch.distributed as dist

_ROUNDS = 5


def aligned_clock() -> tuple[int, int]:
    """Return this rank's clock and rank 0's, in ns, at one moment of the default process group.

    Rank 0 sends its time some rounds; the message that was fastest is off by least.
    """
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        dist.barrier()
        sent = torch.tensor([time.time_ns()], dtype=torch.int64)
        dist.broadcast(sent, 0)
        pair = (time.time_ns(), int(sent.item()))
        if best is None or pair[0] - pair[1] < best[0] - best[1]:
            best = pair
    assert best is not None
    return (best[1], best[1]) if dist.get_rank() == 0 else best
