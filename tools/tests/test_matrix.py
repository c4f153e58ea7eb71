"""The matrix is made of what nox lists, and has the shape that the workflow reads."""

import json
import subprocess
import sys

from tools.matrix import matrix
from tools.packages import PACKAGES, PYTHONS, ROOT


def test_each_session_runs_on_the_oldest_python_and_the_marked_ones_on_all():
    rows = matrix(
        [
            {"session": "lint", "tags": ["ci"]},
            {"session": "tests", "tags": ["ci", "each-python"]},
            {"session": "workspace", "tags": []},
        ]
    )["include"]
    assert rows[0] == {"session": "lint", "python": PYTHONS[0]}
    assert [row["python"] for row in rows if row["session"] == "tests"] == list(PYTHONS)
    assert "workspace" not in {row["session"] for row in rows}


def test_the_session_prints_one_json_document_with_a_row_for_every_package():
    command = [sys.executable, "-m", "nox", "-s", "matrix"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["include"]
    assert all(row.keys() == {"session", "python"} for row in rows)
    sessions = {row["session"] for row in rows}
    assert {f"isolated({package.short})" for package in PACKAGES} < sessions
    assert {"tests", "slow", "lint", "types", "contracts", "subsets", "floors", "compat"} < sessions
    assert not sessions & {"gpu", "matrix", "workspace"}
