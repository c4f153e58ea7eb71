"""The table of refusals in the guide is what capture refuses: each row has functions that show it.

The second time at the latest, calling the captured function raises a `CaptureError` with the words
of its row.
"""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
import vescale_dtensor as vd
import vescale_dtensor._capture
from capture_guards import rows, spread
from refusal_rows import ROWS, Built
from state_keepers import Keeper, keep_count
from vescale_comm.testing import on_ranks

GUIDE = (Path(__file__).parents[2] / "docs" / "capture.md").read_text()
TABLE = GUIDE.partition("| refused | the error says | write instead |\n|---|---|---|\n")[2]
TABLE = TABLE.partition("\n\n")[0]


def test_the_guide_has_these_rows():
    said = [line.split(" | ")[1] for line in TABLE.splitlines()]
    assert said == [words for words, *_ in ROWS]


def refusals():
    """What the code of capture says where it refuses, as it is written there."""
    for path in sorted(Path(vescale_dtensor._capture.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "")
            words = ast.unparse(node.args[0]) if called in ("refusal", "CaptureError") else ""
            # Of others the words are made elsewhere; and what a check finds is no refusal.
            if len(words.split()) > 4 and "differs from the function" not in words:
                yield path.name, words


# What the words of a refusal are made of, or are followed by.
MADE_OF = "{why}", "{mismatch}"


def test_the_table_has_each_refusal():
    missing = [
        found
        for found in refusals()
        if not any(words in found[1] for words, *_ in ROWS)
        and not any(part in found[1] for part in MADE_OF)
    ]
    assert not missing


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: ROWS[number][0])
@on_ranks(2)
def test_each_row_is_refused(number):
    words, *functions = ROWS[number]
    for function in functions:
        more = {}
        if isinstance(function, Built):
            function = function.make()
        if isinstance(function, partial):
            function, more = function.func, function.keywords
        captured = vd.capture(function)
        with pytest.raises(vd.CaptureError, match=words):
            [captured(spread(rows()), **more) for _ in range(2)]


@on_ranks(2)
def test_unguarded_names_are_allowed():
    keeper = Keeper()
    captured = vd.capture(lambda x: keep_count(x, keeper), unguarded=["calls"])
    for _ in range(3):
        assert torch.equal(captured(spread(rows())).full_tensor(), rows() * 2)
    assert keeper.calls == 1
    assert len(captured.programs) == 1
