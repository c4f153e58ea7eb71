"""What a call costs one rank as the world grows: 8 to 16,384 ranks on torch's fake process group.

Each line is the time on that many ranks over the time on 8. The fake group sends nothing, but it
fills the result of a gather, which has as many parts as there are ranks: gathers grow by that.
Run by itself with a number of ranks, it prints the seconds of one process as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

WORLDS = (8, 64, 512, 4096, 16384)
REPEAT = 5  # times, of which the best counts


def measure() -> Iterator[Any]:
    """One line for each operation and number of ranks."""
    from tools.bench import Ratio

    base = _seconds(WORLDS[0])
    for world in WORLDS[1:]:
        for name, seconds in _seconds(world).items():
            label = f"{name}, {world} ranks"
            yield Ratio(label, seconds, base[name], "s", f"{WORLDS[0]} ranks")


def details() -> tuple[str, dict[str, list[float]]]:
    """The same as a table in microseconds, a row for each operation."""
    found = [_seconds(world) for world in WORLDS]
    rows = {name: [1e6 * each[name] for each in found] for name in found[0]}
    lines = [f"| microseconds | {' | '.join(f'{world:,} ranks' for world in WORLDS)} |"]
    lines.append("|---" * (1 + len(WORLDS)) + "|")
    for name, times in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{time:.0f}' for time in times)} |")
    return "\n".join(lines), rows


@lru_cache(maxsize=len(WORLDS))
def _seconds(world: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__)), str(world), str(REPEAT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _best(call: Callable[[], Any], repeat: int) -> float:
    call(), call()  # planned, and compiled
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from _world_case import mesh_of, operations

    torch.set_num_threads(1)  # threads that wait for busy cores are no cost of a call
    cases = operations(mesh_of(int(sys.argv[1])))
    print(json.dumps({name: _best(call, int(sys.argv[2])) for name, call in cases}))
