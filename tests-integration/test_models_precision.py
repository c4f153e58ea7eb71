"""In bf16, by autocast or as a whole, a model on a mesh errs as one device errs.

Both are measured against the same training step in float64, dropout included: see
`model_precision`. Partial sums over ranks are added in bf16 where the op's result is in bf16, so a
few roundings more than on one device are due; the factors below say how many, and are close to one.
"""

from __future__ import annotations

import importlib.util

import pytest
from model_precision import MODES, Errors, measure
from model_runs import LAYOUTS
from model_zoo import MODELS
from vescale_comm.testing import run

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# A gradient is the sum of a step's roundings, so that it scatters; AdamW's first step is hardly
# more than the signs of gradients, and scatters more.
OUTPUT, GRADIENT, STEP = 1.25, 1.4, 1.75
# The mean over rows of differences of logits: rounded to bf16, where the model is.
LOSS = {"autocast": 2.0**-11, "bf16 model": 2.0**-8}


def judged(name: str, layout: str, mode: str) -> None:
    found: Errors
    one: Errors
    found, one = run(measure, 4, name, layout, mode, timeout=280)[0]
    assert 2.0**-10 < one.output < 2.0**-5, "half precision is not what was measured"
    assert found.loss <= one.loss + LOSS[mode], (found, one)
    assert found.output <= OUTPUT * one.output, (found, one)
    assert found.gradient <= GRADIENT * one.gradient, (found, one)
    assert found.step <= STEP * one.step, (found, one)


A_FEW = [
    ("Llama", "dp=2, tp=2", "autocast"),
    ("GPT-2", "tp=4", "bf16 model"),
    ("BERT", "dp=2, tp=2", "bf16 model"),
    ("ViT", "dp=4", "autocast"),
]
REST = [
    (name, layout, mode)
    for name in MODELS
    for layout in LAYOUTS
    for mode in MODES
    if (name, layout, mode) not in A_FEW
]


@pytest.mark.parametrize(("name", "layout", "mode"), A_FEW)
def test_named_models_in_half_precision(name: str, layout: str, mode: str) -> None:
    judged(name, layout, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "mode"), REST)
def test_every_layout_in_half_precision(name: str, layout: str, mode: str) -> None:
    judged(name, layout, mode)
