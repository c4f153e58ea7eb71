"""torchao: optimizers with states of few bits, and weights that are quantised once laid out."""

from __future__ import annotations

from typing import Any

import torch
import torchao
from ecosystem_models import batch, classifier, steps
from ecosystem_runs import Found, Run, parameters
from torchao.quantization import Int8WeightOnlyConfig, quantize_

PACKAGES = ("torchao",)


def with_optimizer(name: str) -> Any:
    def case(run: Run) -> Found:
        model = run.parallelize(classifier())
        # Smaller parameters than a block have states of 32 bits.
        optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2, block_size=16)
        torch.manual_seed(6)
        return {"losses": steps(model, optimizer, *batch()), **parameters(model)}

    return case


def quantised(run: Run) -> Found:
    model = run.parallelize(classifier()).eval()
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        return {"logits": model(batch()[0])}


REFUSED = {
    ("Int8WeightOnlyConfig", "dp=4, zero=3"): "quantize_ replaces parameters, whose values zero "
    "keeps in a buffer: quantise on a mesh without zero"
}
NAMES = ("Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8")
CASES = {
    **{name: with_optimizer(name) for name in NAMES},
    "Int8WeightOnlyConfig": quantised,
}
