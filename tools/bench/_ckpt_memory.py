"""Peak memory of saving and loading, in processes that have done nothing else before.

A process that has freed memory takes it again without the kernel seeing it: what it has to give
back is given back, and a meter that is shown a known amount must report it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tools.bench._ckpt_ranks import LOADS, ROWS, destination, prepare
from tools.bench._ckpt_sides import sides

KNOWN = 64 << 20


def peaks(rank: int, world_size: int, folder: str, count: int, extent: int) -> dict[str, float]:
    """Bytes beyond what was there before, at most, by side and action; `meter` is for `KNOWN`."""
    mesh, values = prepare(world_size, count, extent)
    found: dict[str, float] = {}
    chosen = sides()
    for name in ("ours", "stock"):
        side = chosen[name]
        state = side.make(values, mesh, ROWS)
        # What is imported and cached once does not count.
        small = side.make([torch.zeros(8, 8)], mesh, ROWS)
        side.save(f"{folder}/{name}-small", small)
        side.load(f"{folder}/{name}-small", small)
        path = f"{folder}/{name}"
        found[f"{name}: save"] = _peak(lambda: side.save(path, state))  # noqa: B023 run at once
        for what, dim in LOADS:
            into = destination(side, values, mesh, dim)
            found[f"{name}: {what}"] = _peak(lambda: side.load(path, into))  # noqa: B023
        begin = side.begin_save
        if begin is not None:
            path = f"{folder}/{name}-async"
            found[f"{name}: async save"] = _peak(lambda: begin(path, state)())  # noqa: B023
        dist.barrier()
    found["meter"] = _peak(lambda: torch.ones(KNOWN, dtype=torch.uint8))
    return found


def _peak(action: Callable[[], object]) -> float:
    dist.barrier()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return max(0, _memory("VmHWM") - before)


def _memory(what: str) -> int:
    """Bytes of memory of this process, now or at most (Linux tells)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def supported() -> bool:
    """Whether the system tells."""
    return Path("/proc/self/clear_refs").exists()
