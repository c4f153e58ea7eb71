"""bitsandbytes: optimizers with states of eight bits, which its kernels step."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from ecosystem_models import classifier, points
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F

PACKAGES = ("bitsandbytes",)


def with_optimizer(name: str) -> Any:
    def case(run: Run) -> Found:
        model = run.parallelize(classifier())
        # Left alone, small parameters have states of 32 bits.
        options = {"min_8bit_size": 64} if "8bit" in name else {}
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-2, **options)
        features, classes = zip(*points(), strict=True)
        x, y = torch.stack(features), torch.tensor(classes)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, **parameters(model)}

    return case


CASES = {name: with_optimizer(name) for name in ("AdamW", "AdamW8bit", "Lion8bit")}
