"""Cells of the table of schedules: each run takes a few, others each day; `-m slow` the rest."""

import zlib
from datetime import UTC, datetime

import pytest
from pipeline_table import LAYOUTS, MODELS, SCHEDULES, TOLERANCE, cell

pytest.importorskip("transformers", reason="transformers is not installed")

_DAY = f"{datetime.now(UTC):%Y%m%d}"
_ONE_IN = 30


def _marked(*names: str) -> object:
    rests = zlib.crc32(f"{_DAY} {names}".encode()) % _ONE_IN
    return pytest.param(*names, marks=[pytest.mark.slow] if rests else [], id=" ".join(names))


CELLS = [_marked(m, s, lay) for m in MODELS for s in SCHEDULES for lay in LAYOUTS]


@pytest.mark.parametrize(("model", "schedule", "layout"), CELLS)
def test_stages_are_one_device(model: str, schedule: str, layout: str) -> None:
    found = cell(model, schedule, layout, 3)
    assert not found.why
    assert found.loss <= TOLERANCE
