"""Unmodified Hugging Face models train over a mesh as on one device, by `Plan.from_hf` alone.

Loss, every gradient and every parameter after one clipped AdamW step, dropout included. What is
compared, and how, is in `plan_runs`; the models are those of `model_zoo`.
"""

from __future__ import annotations

import importlib.util

import pytest
from model_zoo_wide import ALL
from plan_runs import LAYOUTS, NAMES, compare, described
from plan_table import FILE
from vescale_parallel import Plan

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# Rounding of float32, through a few layers.
LIMIT = 2e-5
CASES = [(name, layout) for name in NAMES for layout in LAYOUTS]
# What a run takes, of each kind of trouble one; `-m slow` takes them all.
CORE = [
    ("Llama", "zero=3, dp=2, tp=2"),
    ("Gemma-2", "tp=4"),
    ("GPT-2", "dp=2, tp=2"),
    ("Bloom", "tp=4"),
    ("BERT", "zero=3, dp=2, tp=2"),
    ("T5", "dp=2, tp=2"),
    ("Whisper", "tp=4"),
    ("ViT", "dp=2, tp=2"),
    ("Mixtral", "dp=2, tp=2"),
    ("DeepSeek-V3", "tp=4"),
]


def judged(name: str, layout: str, **options: bool) -> None:
    found = compare(name, layout, **options)
    assert found.worst < LIMIT, found


@pytest.mark.parametrize(("name", "layout"), CORE)
def test_models_of_each_kind(name: str, layout: str) -> None:
    judged(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_all_models(name: str, layout: str) -> None:
    judged(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_all_models_sequence_parallel(name: str, layout: str) -> None:
    judged(name, layout, sequence_parallel=True)


def test_the_table_tells_what_presets_make_of_models_today() -> None:
    told = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        told[cells[0]] = cells[1:4]
    layout = next(iter(LAYOUTS))
    stale = []
    for name in NAMES:
        model = ALL[name].make()
        found = described(model, Plan.from_hf(model), LAYOUTS[layout][0])
        if told.get(name) != found.cells:
            stale.append((name, told.get(name), found.cells))
    assert not stale, "run: python tests-integration/plan_table.py"
