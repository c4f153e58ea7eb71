"""The core is the same list of cases on any day, and its tables name tests that there are."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vescale_comm.testing._core import read_core

from tools.packages import ROOT

# A plugin that sets the clock before any test is imported.
CLOCK = """
import datetime, os, time

THEN = float(os.environ["CLOCK_SET_TO"])
time.time = lambda: THEN
time.time_ns = lambda: int(THEN * 1e9)

class DateTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(THEN, tz)

    @classmethod
    def utcnow(cls):
        return cls.utcfromtimestamp(THEN)

    today = now

class Date(datetime.date):
    @classmethod
    def today(cls):
        return cls.fromtimestamp(THEN)

datetime.datetime, datetime.date = DateTime, Date
"""
DAYS = (1_800_000_000, 1_912_345_678)  # in 2027, on a Friday; in 2030, on a Wednesday
ROTATING = """
from datetime import UTC, datetime
import pytest

@pytest.mark.parametrize("day", [datetime.now(UTC).toordinal() % 7])
def test_a_day(day): pass
"""
TABLES = sorted((ROOT / "packages").glob("*/tests/core.txt"))


def collected(folder: Path, *paths: str) -> list[set[str]]:
    """The cases that pytest would run of these paths on each of the two days."""
    (folder / "clock.py").write_text(CLOCK)
    options = ["--collect-only", "-q", "-p", "clock", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(folder), "CLOCK_SET_TO": str(day)},
        )
        for day in DAYS
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    return [{line for line in output.splitlines() if "::" in line} for output in outputs]


def test_two_days_have_the_same_cases(tmp_path):
    """Cases of one folder of each package whose core is chosen by a table."""
    paths = [f"packages/vescale-{one}" for one in ("dtensor/tests/joint", "parallel/tests/zero")]
    assert [table.parent for table in TABLES] == [(ROOT / path).parent for path in paths]
    first, second = collected(tmp_path, *paths)
    assert first == second
    for path in paths:
        assert any(case.startswith(path) for case in first), path


@pytest.mark.slow  # imports all tests twice
def test_two_days_have_the_same_cases_of_all_packages(tmp_path):
    first, second = collected(tmp_path, "packages", "tools/tests")
    assert first == second
    assert len(first) > 2_000


def test_a_choice_by_the_date_would_be_seen(tmp_path):
    file = tmp_path / "test_rotating.py"
    file.write_text(ROTATING)
    first, second = collected(tmp_path, "--rootdir", str(tmp_path), str(file))
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.parent.parent.name)
def test_a_table_names_tests_that_there_are(table):
    shares, kept = read_core(table)
    for name in [*shares, *kept]:
        file, _, test = name.partition("::")
        path = table.parent / f"{file}.py"
        assert path.exists(), name
        if test:
            nodes = ast.walk(ast.parse(path.read_text()))
            known = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert test.split("[")[0] in known, name
