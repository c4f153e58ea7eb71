"""Other people's libraries train a parallelised model as one device; `ecosystem/` has the cases.

A few run with the other tests of models; `nox -s ecosystem` runs all, and writes the table.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
from ecosystem_runs import FOLDER, compare
from ecosystem_table import FILE, LIMIT, load_name
from vescale_comm.testing import run

pytestmark = pytest.mark.models
FEW = [
    ("transformers", "Trainer", "dp=2, tp=2"),
    ("transformers", "Trainer, resumed", "dp=4, zero=3"),
    ("accelerate", "Accelerator, resumed", "dp=2, tp=2"),
    ("lightning", "Trainer", "dp=4, zero=3"),
    ("peft", "LoRA", "dp=2, tp=2"),
]
# What the cases of a library import beside it.
BESIDE = {"transformers": ["accelerate"], "peft": ["transformers"]}


@pytest.mark.parametrize(("library", "case", "layout"), FEW)
def test_a_mesh_trains_as_one_device(library: str, case: str, layout: str) -> None:
    for needed in [library, *BESIDE.get(library, [])]:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    found = run(compare, 4, library, case, [layout], timeout=280)[0][layout]
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= LIMIT, (worst, found[worst])


def test_the_table_has_every_library() -> None:
    rows = re.findall(r"^\| (\S+) \d", FILE.read_text(encoding="utf-8"), re.M)
    assert set(rows) == {load_name(path.stem) for path in FOLDER.glob("*.py")}
