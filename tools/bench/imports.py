"""Times the import of a package in fresh processes, beside torch alone and DTensor.

Seconds beside `import torch`; seconds of processor time and modules beside
`import torch.distributed.tensor`, on which all of them build.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from tools.bench import Ratio
from tools.packages import PACKAGES

BASE = "torch.distributed.tensor"
TIMED = """
import importlib, json, sys, time
start, used = time.perf_counter(), time.process_time()
import torch
middle = time.perf_counter()
importlib.import_module({module!r})
print(json.dumps({{
    "torch": middle - start,
    "seconds": time.perf_counter() - start,
    "processor": time.process_time() - used,
    "modules": len(sys.modules),
}}))
"""


def measure(repeat: int = 3) -> Iterator[Ratio]:
    """Three lines for each package. Each is imported once before: bytecode may be written then."""
    for module in [BASE, *(package.module for package in PACKAGES)]:
        _import(module)
    for package in PACKAGES:
        # Pairs, because the load of the machine differs more between processes than within one.
        pairs = [(_import(BASE), _import(package.module)) for _ in range(repeat)]
        name = f"import {package.module}"
        ours = sorted((one["seconds"], one["torch"]) for _, one in pairs)[repeat // 2]
        yield Ratio(name, *ours, "s", "import torch")
        for what, unit in (("processor", "s of processor"), ("modules", "modules")):
            base, own = (median(pair[side][what] for pair in pairs) for side in (0, 1))
            yield Ratio(name, own, base, unit, f"import {BASE}")


def _import(module: str) -> dict[str, float]:
    # -I: neither the checkout nor the environment's variables decide what is imported.
    command = [sys.executable, "-I", "-c", TIMED.format(module=module)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
