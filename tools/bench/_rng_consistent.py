"""Measures what `torch_dtensor.consistent()` adds to a dropout and to other ops.

Each of two ranks drops its rows of a batch, as under FSDP2 or DDP: stock draws for these rows
alone, the block for the rows of the one device. Rank 0 is timed, by the time of its thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from vescale_comm.testing import run
from vescale_rng.torch_dtensor import consistent

from tools.bench import Ratio, in_turn

RANKS = 2
Size = tuple[int, int]
SHAPES: tuple[Size, ...] = ((8, 8), (64, 256), (1024, 1024), (4096, 2048))
# What is asked of the other ranks in the block: at each draw how many rows they have, or never.
KINDS = ("each draw asks", "rows declared")
Found = dict[tuple[str, str], float]
OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "F.dropout": lambda x: F.dropout(x, 0.1),
    "nn.Dropout, fwd + bwd": lambda x: _trained(torch.nn.Dropout(0.1), x),
    "F.relu": F.relu,
}


def costs(rounds: int, shapes: Sequence[Size] = SHAPES, seconds: float = 0.02) -> Iterator[Ratio]:
    """Microseconds of one call inside of the block, against outside of it, size by size."""
    for shape in shapes:
        found: Found = run(_rank, RANKS, shape, rounds, seconds, timeout=300)[0]
        for op in OPS:
            # What draws nothing asks nobody.
            for kind in KINDS if "ropout" in op else KINDS[-1:]:
                name = f"consistent: {op}, {shape[0]} x {shape[1]}, {kind}"
                yield Ratio(name, found[op, kind], found[op, "stock"], "us", "stock")


def _rank(rank: int, world_size: int, shape: Size, rounds: int, seconds: float) -> Found:
    torch.set_num_threads(1)
    times: dict[tuple[str, str], list[float]] = {}
    for op, call in OPS.items():
        number = _number(call, shape, seconds)
        for turn in range(rounds):
            for kind in in_turn(("stock", *KINDS), turn):
                torch.manual_seed(0)
                with _block(kind, shape[0]):
                    times.setdefault((op, kind), []).append(_one(call, shape, number))
    return {key: statistics.median(each) * 1e6 for key, each in times.items()}


def _block(kind: str, rows: int) -> AbstractContextManager[None]:
    if kind == "stock":
        return nullcontext()
    return consistent(data=dist.group.WORLD, rows=rows if kind == "rows declared" else None)


def _number(call: Callable[[torch.Tensor], object], shape: Size, seconds: float) -> int:
    """How many calls take about so long: the same on all ranks, or they would wait for ever."""
    once = torch.tensor(_one(call, shape, 3))
    dist.all_reduce(once, dist.ReduceOp.MAX)
    return max(1, min(1000, int(seconds / once.item())))


def _one(call: Callable[[torch.Tensor], object], shape: Size, number: int) -> float:
    """Seconds of this thread for one call, in the middle of many."""
    x = torch.ones(shape, requires_grad=True)
    call(x)
    call(x)  # what the first one found out is known to it
    dist.barrier()
    start = time.thread_time()
    for _ in range(number):
        call(x)
    return (time.thread_time() - start) / number


def _trained(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).backward(torch.ones_like(x))
