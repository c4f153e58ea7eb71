"""What comparing the ranks' executions costs a training step, against the same without it.

On 4 gloo ranks of one machine, dp=2 x tp=2, in blocks of steps that take turns. CPU time is that of
a process, with the thread that compares; a busy machine changes it less than the time of a step.
Each tensor's lineage is made in both: `bound_waits(compare=False)` leaves out what is done with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from vescale_comm import bound_waits, execution_log
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard, distribute_module, distribute_tensor

WIDTH, ROWS, BLOCKS = 64, 32, 2
STEPS, TURNS = 10, 12


def measure() -> Iterator[Any]:
    """Two lines for the step, and how much there is to compare."""
    from tools.bench import Ratio

    found = run(_measured, 4, timeout=600)[0]
    for unit, index in (("ms", 0), ("ms of CPU", 1)):
        ours, reference = (found[kind][index] for kind in (True, False))
        yield Ratio("training step", 1e3 * ours, 1e3 * reference, unit, "compare=False")
    yield Ratio("events of a step", found["events"], 1, "", "one")


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to its input."""
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def _measured(rank: int, world: int) -> dict[Any, Any]:
    step = _training()
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for turn in range(TURNS):
        # Which is first changes, so that neither profits from what the other has warmed.
        for compare in (True, False) if turn % 2 else (False, True):
            bound_waits(compare=compare)
            step()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step()
            end = time.perf_counter(), time.process_time()
            times[compare].append(((end[0] - start[0]) / STEPS, (end[1] - start[1]) / STEPS))
    bound_waits(compare=True)
    found: dict[Any, Any] = {
        compare: tuple(median(column) for column in zip(*rows, strict=True))
        for compare, rows in times.items()
    }
    log = execution_log(range(world))
    assert log is not None
    before = log.count
    step()
    found["events"] = log.count - before
    return found


def _training() -> Callable[[], None]:
    """Return a step of AdamW on a model that is sharded over tp, with its batch over dp."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        for linear, dim in ((block.up, 0), (block.down, 1)):
            weight = distribute_tensor(linear.weight.detach(), mesh, [Replicate(), Shard(dim)])
            linear.weight = nn.Parameter(weight)
    distribute_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x = distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [Shard(0), Replicate()])

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step
