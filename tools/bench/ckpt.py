"""Saving and loading a sharded state by vescale_ckpt and by torch.distributed.checkpoint.

Four gloo processes hold the same tensors, cut by rows. Both sides write the same bytes and do not
return before they are synced to disk (DCP syncs its data files and its metadata; ours also the
directories). Loading is from the page cache, into memory that has been touched: into the same
layout, and into tensors cut by columns. DCP stages into memory that it keeps, keeps its plans and
writes with as many threads as ours: cores by ranks. It has no option to read with several, so that
a load is like for like where there are no more cores than ranks, as on the two of the pages. Ours
also computes checksums of what it writes, XXH3 where xxhash is installed and CRC-32 otherwise, and
verifies all that it reads; where xxhash is installed, lines with CRC-32 follow.
torch_checkpointing, where it is installed, syncs nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._ckpt_memory import KNOWN, peaks, supported
from tools.bench._ckpt_ranks import BLOCKED, LOADS, checksum_seconds, save_and_load

RANKS = 4
STOCK = "torch.distributed.checkpoint"
_GOALS = {"save": 1 / 1.3, "load": 1 / 1.3, "load, resharded": 1 / 2, BLOCKED: 1.0}
_TIMED = ("save", *(what for what, _ in LOADS))
Found = dict[str, dict[str, float]]


def measure(count: int = 8, extent: int = 2048, rounds: int = 11) -> Iterator[Ratio]:
    """Seconds and GB/s, bytes read for each byte that is needed, and memory at its peak."""
    # Memory first: the processes that the next line starts are kept, and have held nothing yet.
    memory = _measured_memory(count, extent) if supported() else []
    with tempfile.TemporaryDirectory(prefix="bench-ckpt-") as folder:
        found = run(save_and_load, RANKS, folder, count, extent, rounds, timeout=300)[0]
    total = count * extent * extent * 4
    checksum = "XXH3" if find_spec("xxhash") else "CRC-32"
    yield from _times(found, total, checksum)
    yield from _others(found)
    yield from _bytes(found, total)
    share = checksum_seconds(total // RANKS)
    loading = found["ours"]["load"]
    yield Ratio(f"{checksum} of what a rank loads", share, loading, "s", "loading it")
    yield from _memory(memory, total)


def _times(found: Found, total: int, checksum: str) -> Iterator[Ratio]:
    ours, stock = found["ours"], found["stock"]
    for what, goal in _GOALS.items():
        name = f"{what}, {total / 1e6:.0f} MB, {checksum}"
        yield Ratio(name, ours[what], stock[what], "s", STOCK, goal)
    for what in _TIMED:
        ours_rate, stock_rate = (total / one[what] / 1e9 for one in (ours, stock))
        yield Ratio(what, ours_rate, stock_rate, "GB/s", STOCK)


def _others(found: Found) -> Iterator[Ratio]:
    """What it costs to have no xxhash, and the other package."""
    for what in _TIMED:
        if "crc32" in found:
            with_crc32, stock = found["crc32"][what], found["stock"][what]
            yield Ratio(f"{what}, CRC-32", with_crc32, stock, "s", STOCK)
        if what in found.get("rival", {}):
            ours, rival = found["ours"][what], found["rival"][what]
            words = "torch_checkpointing" + (", unsynced" if what == "save" else "")
            yield Ratio(what, ours, rival, "s", words)


def _bytes(found: Found, total: int) -> Iterator[Ratio]:
    for what, _ in LOADS:
        ours, stock = (found[side][f"{what}: bytes"] * RANKS / total for side in ("ours", "stock"))
        yield Ratio(f"{what}: bytes read / needed", ours, stock, "x", STOCK)
        yield Ratio(f"{what}: bytes read", ours, 1, "x", "what is needed", 1.05)


def _measured_memory(count: int, extent: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="bench-ckpt-") as folder:
        return run(peaks, RANKS, folder, count, extent, timeout=120)


def _memory(ranks: list[dict[str, float]], total: int) -> Iterator[Ratio]:
    """Of all ranks together; memory that they share counts for each of them."""
    if not ranks:
        return  # only Linux tells
    for what in (*_TIMED, "async save"):
        ours, stock = (sum(one[f"{side}: {what}"] for one in ranks) for side in ("ours", "stock"))
        yield Ratio(f"{what}: memory at its peak", ours / total, 1, "x", "the checkpoint")
        yield Ratio(f"{what}: memory at its peak", ours / 1e6, stock / 1e6, "MB", STOCK)
    seen = sum(one["meter"] for one in ranks)
    yield Ratio("the meter of memory", seen / 1e6, RANKS * KNOWN / 1e6, "MB", "what was taken")
