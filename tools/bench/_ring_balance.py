"""Measures how even a causal ring is by the layout of rows: time of the busiest rank.

Zigzag gives rank r of n the blocks r and 2 n - 1 - r of 2 n, so that all have the same to do; no
placement says that, so it is run on intervals. Stripes are `InterleavedShard`, `"cp:1/16"`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from vescale_comm import as_group
from vescale_comm.testing import run
from vescale_dtensor._ops.nn.ring_attention import ring_attention
from vescale_dtensor._ops.nn.ring_turns import Ring

from tools.bench import Ratio, in_turn

Intervals = tuple[tuple[int, int], ...]

RANKS, STRIPES = 4, (1, 4, 16, 64)
ZIGZAG = "zigzag"


@dataclass(frozen=True)
class Job:
    """Attention of one layer."""

    length: int = 4096
    heads: int = 4
    features: int = 64
    rounds: int = 5


def stripes(blocks: int, length: int, ranks: int = RANKS) -> tuple[Intervals, ...]:
    """The rows of each rank in so many blocks, as `InterleavedShard` has them."""
    size = length // (ranks * blocks)
    starts = [[(at * ranks + rank) * size for at in range(blocks)] for rank in range(ranks)]
    return tuple(tuple((start, start + size) for start in one) for one in starts)


def zigzag(length: int, ranks: int = RANKS) -> tuple[Intervals, ...]:
    """The rows of each rank, a block of the one end and one of the other."""
    size = length // (2 * ranks)
    pairs = [(rank * size, (2 * ranks - 1 - rank) * size) for rank in range(ranks)]
    return tuple(tuple((start, start + size) for start in pair) for pair in pairs)


def seconds(rank: int, world_size: int, job: Job) -> dict[str, float]:
    """The least processor time of this rank in a forward and its backward, by layout."""
    torch.set_num_threads(1)
    layouts = {str(one): stripes(one, job.length) for one in STRIPES}
    layouts[ZIGZAG] = zigzag(job.length)
    shape = (1, job.heads, job.length // world_size, job.features)
    parts = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    found: dict[str, float] = {}
    for turn in range(job.rounds + 1):
        for name in in_turn(layouts, turn):
            rows = layouts[name]
            ring = Ring(as_group(None), rows, rows, causal=True)
            dist.barrier()
            # Of the process: backward runs on another thread. What ranks wait is not in it.
            start = time.process_time()
            query, key, value = parts
            scale = job.features**-0.5
            out = ring_attention(query, key, value, None, None, ring, scale, 1.0)
            out.sum().backward()  # type: ignore[no-untyped-call]
            taken = time.process_time() - start
            if turn:
                found[name] = min(taken, found.get(name, taken))
    return found


def measure(job: Job) -> Iterator[Ratio]:
    """Stripes against zigzag: what the busiest rank takes."""
    ranks = run(seconds, RANKS, job, timeout=600)
    busiest = {name: max(one[name] for one in ranks) * 1e3 for name in ranks[0]}
    for blocks in STRIPES:
        title = f"causal ring, cp:1/{blocks}: busiest rank"
        yield Ratio(title, busiest[str(blocks)], busiest[ZIGZAG], "ms", ZIGZAG)
