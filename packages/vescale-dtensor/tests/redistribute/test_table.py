"""REDISTRIBUTION.md says what the planner does today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "redistribution_table.py"


def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("redistribution_table", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.FILE.read_text(encoding="utf-8")
    assert written == script.text(), "run: python benchmarks/redistribution_table.py"
