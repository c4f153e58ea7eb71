"""Import time of each package, against `import torch` alone, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from tools.bench import Ratio, interleaved
from tools.packages import PACKAGES


def measure() -> Iterator[Ratio]:
    """One line for each package: the process that imports it, and one that imports torch."""
    for package in PACKAGES:
        ours, reference = interleaved(
            partial(_import, package.module), partial(_import, "torch"), repeat=5
        )
        yield Ratio(f"import {package.module}", ours, reference, "s", "import torch")


def _import(module: str) -> None:
    # -I: neither the checkout nor the environment's variables decide what is imported.
    subprocess.run([sys.executable, "-I", "-c", f"import {module}"], check=True)
