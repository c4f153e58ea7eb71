"""The example model on four processes (dp=2, tp=2), ours and torch's, beside one device.

torch's is `parallelize_module` (tensor and sequence parallel) and `fully_shard` (FSDP2), see
`_stock_plan.py`; dropout is on, in attention and residual. All three train in turns in one run, on
gloo, one thread a process. Our losses must be those of one device; torch's draw other dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vescale_comm.testing import run
from vescale_parallel.train import plan
from vescale_parallel.train.model import ModelConfig

from tools.bench import Ratio
from tools.bench._code_lines import code_lines
from tools.bench._consistency_ranks import train

STEPS = 20
STOCK = "TP + FSDP2 of torch"

_OUR_CALL = """
mesh = vescale_parallel.mesh(dp=2, tp=2)
vescale_parallel.parallelize(model, mesh, PLAN)
"""
_STOCK_CALL = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
parallelize_by_torch(model, mesh)
loss = model(own_part(tokens, mesh), own_part(targets, mesh))
"""


def measure(steps: int = STEPS, layers: int = ModelConfig.layers) -> Iterator[Ratio]:
    """Losses, random numbers, traffic, time and user code."""
    found = run(train, 4, steps, ModelConfig(layers=layers), timeout=60 + 10 * steps)[0]
    losses = found["losses"]
    ours, stock = (largest_difference(losses[side], losses["one"]) for side in ("ours", "stock"))
    yield Ratio(f"largest loss difference, {steps} steps", ours, stock, "rel.", STOCK)
    yield _both(found["dropped"], "elements dropped as on one device")
    yield _both(found["start"], "parameters as built, then cut")
    yield _both(found["refilled"], "parameters initialised in place")
    yield _both({s: sum(c.values()) for s, c in found["collectives"].items()}, "collectives", "")
    yield _both({s: b / 1e6 for s, b in found["bytes"].items()}, "bytes sent per rank", "MB")
    yield _both(found["seconds"], "step of 4 processes", "s")
    one = found["seconds"]["one"]
    yield Ratio("step of 4 processes", found["seconds"]["ours"], one, "s", "one process, 1 thread")
    yield Ratio("user code", *_user_code(), "lines", STOCK)


def _both(values: dict[str, Any], name: str, unit: str = "of all") -> Ratio:
    return Ratio(name, values["ours"], values["stock"], unit, STOCK)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Relative, over the steps; never less than half a unit in the last place of float32."""
    pairs = zip(losses, reference, strict=True)
    resolution = torch.finfo(torch.float32).eps / 2
    return max(resolution, *(abs(loss - one) / abs(one) for loss, one in pairs))


def _user_code() -> tuple[int, int]:
    """Lines that a user writes to lay the model out: plan, call, and care for the batch."""
    stock = Path(__file__).with_name("_stock_plan.py").read_text()
    return (
        code_lines(inspect.getsource(plan)) + code_lines(_OUR_CALL),
        code_lines(stock) + code_lines(_STOCK_CALL),
    )
