"""bitsandbytes: optimizers with states of eight bits, which its kernels step."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from ecosystem_models import batch, classifier, steps
from ecosystem_runs import Found, Run, parameters

PACKAGES = ("bitsandbytes",)


def with_optimizer(name: str) -> Any:
    def case(run: Run) -> Found:
        model = run.parallelize(classifier())
        # Left alone, small parameters have states of 32 bits.
        options = {"min_8bit_size": 64} if "8bit" in name else {}
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, **options)
        torch.manual_seed(6)
        return {"losses": steps(model, optimizer, *batch()), **parameters(model)}

    return case


CASES = {name: with_optimizer(name) for name in ("AdamW", "AdamW8bit", "Lion8bit")}
