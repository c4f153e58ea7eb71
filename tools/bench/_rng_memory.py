"""Peak extra memory of a fill, each in a process of its own: the kernel counts its peak."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.bench import Ratio

SHAPE = (1 << 16, 1 << 16)
RANKS = 1 << 12

MEASURED = """
import ctypes, sys
from pathlib import Path
import torch, vescale_rng
from torch.distributed.tensor import Shard

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

policy, dim, rows, columns, ranks = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
layout = vescale_rng.layout_of((rows, columns), [Shard(dim)], (ranks,), (ranks // 2,))
with vescale_rng.use(policy):
    # What is imported and asked for once does not count.
    vescale_rng.fill_(torch.empty(4, 4), vescale_rng.Normal(), vescale_rng.whole((4, 4)))
    local = torch.zeros(layout.local_shape)
    # Else what imports have freed would be taken again, and not be seen.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    vescale_rng.fill_(local, vescale_rng.Normal(), layout)
    print(max(0, status("VmHWM") - before))
"""


def peaks() -> Iterator[Ratio]:
    """One line for each policy and cut, in bytes beside those of the whole tensor."""
    if not Path("/proc/self/clear_refs").exists():
        return  # only Linux tells
    whole = 4 * SHAPE[0] * SHAPE[1]
    for policy, dims in (("native", ((0, "rows"),)), ("portable", ((0, "rows"), (1, "columns")))):
        for dim, cut in dims:
            arguments = [policy, *map(str, (dim, *SHAPE, RANKS))]
            command = [sys.executable, "-c", MEASURED, *arguments]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            name = f"{policy}: peak beyond the {cut}, of {whole >> 30} GiB"
            yield Ratio(name, float(done.stdout), whole, "B", "the whole")
