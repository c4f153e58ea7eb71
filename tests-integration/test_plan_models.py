"""Unmodified Hugging Face models train over a mesh as on one device, by `Plan.from_hf` alone.

Loss, every gradient and every parameter after one clipped AdamW step, dropout included. What is
compared, and how, is in `plan_runs`; the models are those of `model_zoo`.
"""

from __future__ import annotations

import importlib.util
import zlib
from datetime import UTC, datetime

import pytest
from plan_runs import LAYOUTS, NAMES, compare
from plan_table import FILE

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# Rounding of float32, through a few layers.
LIMIT = 2e-5
# A run takes one case in sixteen, another part each day; `-m slow` takes them all.
SHARE = 16


def of_today(name: str, layout: str) -> bool:
    text = f"{datetime.now(UTC):%Y%m%d} {name} {layout}"
    return zlib.crc32(text.encode()) % SHARE == 0


CASES = [(name, layout) for name in NAMES for layout in LAYOUTS]


def judged(name: str, layout: str, **options: bool) -> None:
    found = compare(name, layout, **options)
    assert found.worst < LIMIT, found


@pytest.mark.parametrize(("name", "layout"), [case for case in CASES if of_today(*case)])
def test_models_of_today(name: str, layout: str) -> None:
    judged(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_all_models(name: str, layout: str) -> None:
    judged(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_all_models_sequence_parallel(name: str, layout: str) -> None:
    judged(name, layout, sequence_parallel=True)


def test_the_table_has_every_model() -> None:
    written = FILE.read_text(encoding="utf-8")
    missing = [name for name in NAMES if f"| {name} |" not in written]
    assert not missing, "run: python tests-integration/plan_table.py"
