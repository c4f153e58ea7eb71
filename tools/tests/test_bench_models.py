"""The benchmark of unmodified models: all sides compute the same, and every figure is there."""

import importlib.util

import pytest

from tools.bench import models
from tools.bench._models.sides import stacks, torch_styles
from tools.bench._models.zoo import ZOO, Sizes, batch_of, built, tokens_of

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
SMALL = {"layers": 2, "batch": 4, "length": 8}


def test_the_smallest_case_has_every_figure():
    asked = {"models": ["Llama"], "layouts": ["dp2.zero3"], "hidden": [16], "rounds": 1, "turn": 1}
    rows = list(models.measure(**asked, only=["eager", "static"], **SMALL))
    found = {(row.name.rpartition(" ")[2], row.unit, row.against) for row in rows}
    units = ("tok/s", "ms own", "MB live", "s first", "coll.", "MB out")
    sides = ("eager", "static")
    assert {(side, unit, "torch") for side in sides for unit in units} <= found
    assert ("static", "tok/s", "eager") in found
    assert ("static", "of calls", "all") in found
    assert all(row.ours > 0 for row in rows if row.unit != "of calls")
    text, data = models.details()
    assert "other units are gathered" in text
    assert list(data) == ["Llama dp2.zero3 16"]


@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_built_and_has_blocks(name: str):
    sizes = Sizes(hidden=16, layers=2, batch=2, length=8)
    batch = batch_of(name, sizes, 0)
    model = built(name, sizes)
    assert model(**batch).loss.requires_grad
    assert len(stacks(model)) == (2 if name == "T5" else 1)
    assert tokens_of(batch) >= sizes.batch * sizes.length
    assert bool(torch_styles(model)) == (name in ("Llama", "Gemma"))
