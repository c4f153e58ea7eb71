"""What `consistency_table.py` writes down holds: features train on layouts as on one device.

Initial parameters, dropout masks and random generators bitwise, 20 losses and the last parameters
within bounds. A run takes the cells of `CORE`; `-m slow` takes them all.
"""

from __future__ import annotations

import pytest
from consistency_models import KINDS
from consistency_runs import FEATURES, LAYOUTS, LOSS_BOUND, PARAMETER_BOUND, compare
from consistency_table import FILE, HEAD

CELLS = [(kind, name, column) for kind in KINDS for name in FEATURES for column in LAYOUTS]
CORE = [
    ("Llama-style", "checkpoint recompute", "zero3·tp2"),
    ("BERT-like", "uneven batch", "HSDP"),
    ("ViT", "tied weights", "dp2·tp2"),
]


def judged(kind: str, name: str, column: str) -> None:
    found = compare(kind, name, column)
    assert found.is_bitwise, found
    assert found.loss <= LOSS_BOUND, found
    assert found.parameter <= PARAMETER_BOUND, found


@pytest.mark.parametrize(("kind", "name", "column"), CORE)
def test_cells_of_each_run(kind: str, name: str, column: str) -> None:
    judged(kind, name, column)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "column"), CELLS)
def test_all_cells(kind: str, name: str, column: str) -> None:
    judged(kind, name, column)


def test_the_table_has_every_row_and_column() -> None:
    written = FILE.read_text(encoding="utf-8")
    ours = written.partition("# The same rows by torch alone")[0]
    missing = [f"## {kind}" for kind in KINDS if f"## {kind}\n" not in ours]
    missing += [name for name in FEATURES if ours.count(f"\n| {name} | ") != len(KINDS)]
    header = "|  | " + " | ".join(LAYOUTS) + " |"
    assert ours.count(header) == len(KINDS), "run: python tests-integration/consistency_table.py"
    assert not missing, missing
    assert HEAD.partition("{date}")[0] in ours
