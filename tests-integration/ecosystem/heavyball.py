"""heavyball: optimizers that precondition."""

from __future__ import annotations

from typing import Any

import heavyball
import torch
from ecosystem_models import classifier, points
from ecosystem_runs import Found, Run, parameters
from torch.nn import functional as F

PACKAGES = ("heavyball",)


def with_optimizer(name: str, **options: Any) -> Any:
    def case(run: Run) -> Found:
        heavyball.utils.compile_mode = None
        model = run.parallelize(classifier())
        optimizer = getattr(heavyball, name)(model.parameters(), lr=1e-2, **options)
        features, classes = zip(*points(), strict=True)
        x, y = torch.stack(features), torch.tensor(classes)
        torch.manual_seed(6)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, **parameters(model)}

    return case


NAMES = ("AdamW", "LaProp", "SFAdamW", "PSGDKron", "Muon")
CASES = {name: with_optimizer(name) for name in NAMES}
NOTES = ("SOAP differs by 2e-1 and ADOPT by 4e-4 after three steps: why has not been looked into",)
