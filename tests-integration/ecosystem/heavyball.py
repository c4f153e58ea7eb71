"""heavyball: optimizers that precondition."""

from __future__ import annotations

from typing import Any

import heavyball
import torch
from ecosystem_models import batch, classifier, steps
from ecosystem_runs import Found, Run, parameters

PACKAGES = ("heavyball",)


def with_optimizer(name: str, **options: Any) -> Any:
    def case(run: Run) -> Found:
        heavyball.utils.compile_mode = None
        model = run.parallelize(classifier())
        optimizer = getattr(heavyball, name)(model.parameters(), lr=1e-2, **options)
        torch.manual_seed(6)
        return {"losses": steps(model, optimizer, *batch()), **parameters(model)}

    return case


NAMES = ("AdamW", "LaProp", "SFAdamW", "PSGDKron", "Muon", "ADOPT")
CASES = {name: with_optimizer(name) for name in NAMES}
# It divides each gradient by the size of the one before: where they are nothing but rounding, one
# device is 1e-3 from itself if each gradient is changed by 6e-8 of its largest element.
LIMITS = {"ADOPT": 5e-3}
NOTES = (
    "SOAP turns gradients into eigenvectors, which small changes turn: one device is 3e-1 from "
    "itself after three steps if each gradient is changed by its rounding, a mesh is 2e-1 from it",
)
