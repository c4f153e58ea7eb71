"""Models that nobody adapted train over a mesh as on one device, by nothing but layouts.

Loss, outputs, every gradient and every parameter after one clipped AdamW step, dropout included.
What is compared, and how, is in `model_runs`; the models are in `model_zoo` and `model_zoo_more`.
"""

from __future__ import annotations

import importlib.util

import pytest
from model_runs import LAYOUTS, Found, compare
from model_table import FILE
from model_zoo import MODELS
from model_zoo_more import MORE
from model_zoo_wide import ALL, WIDE_ZOO
from vescale_comm.testing import run

pytestmark = pytest.mark.models
HERE = importlib.util.find_spec("transformers") is not None
# Rounding of float32, through a few layers.
LIMIT = 2e-5


def judged(name: str, layout: str) -> Found:
    if not HERE and not name.startswith("torch: "):
        pytest.skip("transformers is not installed")
    found: Found = run(compare, 4, name, layout, timeout=280)[0]
    assert abs(found.loss) < LIMIT, found
    assert found.output < LIMIT, found
    assert found.gradient < LIMIT, found
    assert found.parameter < LIMIT, found
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_named_models(name: str, layout: str) -> None:
    found = judged(name, layout)
    assert not found.inside, "fell back inside the blocks"
    assert found.blocks > 0, "the blocks were not seen"


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_models(name: str) -> None:
    judged(name, "dp=2, tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE_ZOO)
def test_models_by_the_dozen(name: str) -> None:
    judged(name, "dp=2, tp=2")


# One of each kind of trouble: experts, recurrence, convolutions, eager attention; and what took a
# fix: ties of experts, custom Functions, rows that look at nothing.
@pytest.mark.parametrize(
    "name",
    [
        "Mixtral",
        "Mamba",
        "T5",
        "torch: LSTM",
        "torch: convolutions",
        "JetMoe",
        "Phimoe",
        "ModernBert",
    ],
)
def test_a_few_more(name: str) -> None:
    judged(name, "dp=2, tp=2")


def test_the_table_has_every_model() -> None:
    written = FILE.read_text(encoding="utf-8")
    missing = [name for name in ALL if f"| {name} |" not in written]
    assert not missing, "run: python tests-integration/model_table.py"
