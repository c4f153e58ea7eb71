"""What importing a package adds to importing torch, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from tools.bench import Ratio
from tools.packages import PACKAGES

TIMED = """
import importlib, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
importlib.import_module({module!r})
print(middle - start, time.perf_counter() - start)
"""


def measure(repeat: int = 3) -> Iterator[Ratio]:
    """One line for each package: seconds to import torch and it, and torch alone."""
    for package in PACKAGES:
        # Pairs, because the load of the machine differs more between processes than within one.
        pairs = sorted(_import(package.module) for _ in range(repeat))
        reference, ours = pairs[repeat // 2]
        yield Ratio(f"import {package.module}", ours, reference, "s", "import torch")


def _import(module: str) -> tuple[float, float]:
    # -I: neither the checkout nor the environment's variables decide what is imported.
    command = [sys.executable, "-I", "-c", TIMED.format(module=module)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, second = done.stdout.split()
    return float(first), float(second)
