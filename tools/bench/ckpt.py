"""Saving and loading a sharded state by vescale_ckpt and by torch.distributed.checkpoint.

Four gloo processes hold the same tensors, cut by rows; both sync to disk when they save. Loading is
from the page cache, into the same layout, and into tensors cut by columns. Ours also computes
checksums of what it writes, and verifies what it reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._ckpt_ranks import checksum_seconds, save_and_load

RANKS = 4
STOCK = "torch.distributed.checkpoint"
_GOALS = {
    "save": 1 / 1.3,
    "load": 1 / 1.3,
    "load, resharded": 1 / 2,
    "async save, blocked": 1.0,
}


def measure(count: int = 8, extent: int = 2048, rounds: int = 7) -> Iterator[Ratio]:
    """Seconds, and bytes read for each byte that is needed."""
    with tempfile.TemporaryDirectory(prefix="bench-ckpt-") as folder:
        found = run(save_and_load, RANKS, folder, count, extent, rounds, timeout=110)
    ours, stock = found[0]["ours"], found[0]["stock"]
    total = count * extent * extent * 4
    for what, goal in _GOALS.items():
        yield Ratio(f"{what}, {total / 1e6:.0f} MB", ours[what], stock[what], "s", STOCK, goal)
    for what in ("load", "load, resharded"):
        ours_read, stock_read = (one[f"{what}: bytes"] * RANKS / total for one in (ours, stock))
        yield Ratio(f"{what}: bytes read / needed", ours_read, stock_read, "x", STOCK)
        yield Ratio(f"{what}: bytes read", ours_read, 1, "x", "what is needed", 1.05)
    for what in ("save", "load", "load, resharded"):
        memory = ours[f"{what}: memory"] * RANKS / total
        yield Ratio(f"{what}: more memory at its peak", memory, 1, "x", "the checkpoint")
    share = checksum_seconds(total // RANKS)
    yield Ratio("checksums of what a rank loads", share, ours["load"], "s", "loading it")
