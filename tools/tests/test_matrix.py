"""The matrix is made of what nox lists, and has the shape that the workflow reads."""

import json
import re
import subprocess
import sys

import pytest

from tools.matrix import MINUTES, USUAL, affected, matrix
from tools.packages import PACKAGES, PYTHONS, ROOT, torch_versions
from tools.parts import PARTS


def test_each_session_runs_on_the_oldest_python_and_the_marked_ones_on_all():
    rows = matrix(
        [
            {"session": "lint", "tags": ["ci"]},
            {"session": "tests", "tags": ["ci", "each-python"]},
            {"session": "workspace", "tags": []},
        ]
    )["include"]
    lint = {"session": "lint", "python": PYTHONS[0], "arguments": "", "minutes": USUAL}
    assert rows[0] == lint
    assert [row["python"] for row in rows if row["session"] == "tests"] == list(PYTHONS)
    assert "workspace" not in {row["session"] for row in rows}


@pytest.mark.parametrize(
    ("paths", "shorts"),
    [
        (["packages/vescale-rng/src/vescale_rng/init.py"], "rng dtensor parallel"),
        (["packages/vescale-ckpt/README.md"], "dtensor ckpt parallel"),
        (["packages/vescale-parallel/tests/conftest.py", "README.md"], "parallel"),
        (["README.md"], ""),
        ([], ""),
        (["packages/vescale-parallel/README.md", "noxfile.py"], "rng comm dtensor ckpt parallel"),
        (["tools/steps.py"], "rng comm dtensor ckpt parallel"),
    ],
)
def test_a_change_concerns_the_packages_that_lean_on_what_changed(paths, shorts):
    assert [package.short for package in affected(paths)] == shorts.split()


def test_the_job_on_gpus_has_the_minutes_of_its_session_and_they_hold_its_longest_test():
    job = (ROOT / ".github/workflows/gpu.yml").read_text().partition("\n  gpu:\n")[2]
    minutes = int(job.partition("timeout-minutes:")[2].split()[0])
    assert minutes == MINUTES["gpu"]
    marked = re.compile(r"pytest\.mark\.timeout\((\d+)\)")
    longest = [
        int(found)
        for package in PACKAGES
        for path in package.tests.rglob("test_*gpu*.py")
        for found in marked.findall(path.read_text())
    ]
    assert max(longest) <= minutes * 60 / 2


def test_what_a_change_does_not_concern_is_left_out():
    sessions = [
        {"session": "lint", "tags": ["ci"]},
        {"session": "tests", "tags": ["ci"]},
        {"session": "isolated(rng)", "tags": ["ci"]},
        {"session": "isolated(parallel)", "tags": ["ci"]},
    ]
    rows = matrix(sessions, affected(["packages/vescale-parallel/pyproject.toml"]))["include"]
    assert [row["session"] for row in rows] == ["lint", "tests", "isolated(parallel)"]
    (arguments,) = (row["arguments"] for row in rows if row["session"] == "tests")
    folders = arguments.split()
    assert folders == ["packages/vescale-parallel/tests", "tools/tests"]
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_each_part_of_what_a_change_does_not_run_is_a_row():
    rows = matrix([{"session": "all_parts", "tags": ["nightly"]}], tag="nightly")["include"]
    assert [row["arguments"] for row in rows] == [f"{k + 1}/{PARTS}" for k in range(PARTS)]


def test_every_night_has_other_random_programs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GITHUB_RUN_NUMBER", "12")
    (row,) = matrix([{"session": "fuzz", "tags": ["nightly"]}], tag="nightly")["include"]
    assert row["arguments"] == "--minutes 120 --seed 1200000"
    assert row["minutes"] > 120


def listed(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "nox", "-s", "matrix", "--", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["include"]
    assert all(row.keys() == {"session", "python", "arguments", "minutes"} for row in rows)
    return {row["session"] for row in rows}


def test_the_session_prints_one_json_document_with_a_row_for_every_package():
    sessions = listed()
    assert {f"isolated({package.short})" for package in PACKAGES} < sessions
    assert {"tests", "lint", "types", "contracts", "subsets", "floors", "compat"} < sessions
    assert {"models", "kernels_interpret", "integration"} < sessions
    assert not sessions & {"gpu", "matrix", "workspace", "all_parts"}


def test_what_takes_long_runs_every_night():
    sessions = listed("--nightly")
    assert "all_parts" in sessions
    assert {f"torches({version})" for version in torch_versions()} < sessions
    assert "tests" not in sessions
