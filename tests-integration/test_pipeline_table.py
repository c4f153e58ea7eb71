"""Cells of the table of schedules: each run takes those of `CORE`; `-m slow` the rest."""

import pytest
from pipeline_table import LAYOUTS, MODELS, SCHEDULES, TOLERANCE, cell

pytestmark = pytest.mark.models
pytest.importorskip("transformers", reason="transformers is not installed")

CORE = {
    ("Llama", "zbv", "pp2·zero3"),
    ("GPT-2", "1f1b", "pp2·dp2·tp2"),
    ("T5", "interleaved", "pp2·tp2"),
}


def _marked(*names: str) -> object:
    marks = [] if names in CORE else [pytest.mark.slow]
    return pytest.param(*names, marks=marks, id=" ".join(names))


CELLS = [_marked(m, s, lay) for m in MODELS for s in SCHEDULES for lay in LAYOUTS]


@pytest.mark.parametrize(("model", "schedule", "layout"), CELLS)
def test_stages_are_one_device(model: str, schedule: str, layout: str) -> None:
    found = cell(model, schedule, layout, 3)
    assert not found.why
    assert found.loss <= TOLERANCE
