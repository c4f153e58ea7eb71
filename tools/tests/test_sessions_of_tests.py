"""Each case is run by a session that has what it needs; both are found by collecting.

The sessions are run with a stand-in that notes what they would install, and which tests they would
run. The cases are those that pytest collects, with their marks; what a case needs is read from the
reasons for which it, its fixtures and its file would be skipped.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import nox
import pytest

from tools import parts
from tools.packages import PACKAGES, ROOT, project_of

OURS = {one.name for one in PACKAGES}
DEFAULT = ["tools/tests", *(f"packages/{one.name}/tests" for one in PACKAGES)]
"""What a call of pytest runs that names nothing: what its settings name."""
# What is there without being asked for: torch for GPUs brings its compiler.
BROUGHT = {"gpu": {"triton"}}


@dataclass
class Run:
    """One call of pytest by a session: what is installed, and what it chooses."""

    session: str
    installed: set[str]
    folders: list[str]
    chosen: str = "not slow"

    def holds(self, case: dict) -> bool:
        """Whether it runs this case, with all that it needs."""
        file = case["id"].split("::")[0]
        words = {*re.findall(r"\w+", self.chosen)} - {"and", "or", "not"}
        marks = {name: name in case["marks"] for name in words}
        return (
            any(file == one or file.startswith(f"{one}/") for one in self.folders)
            and bool(eval(self.chosen or "True", {}, marks))
            and self.installed.issuperset(case["needs"])
        )


@dataclass
class Noted:
    """Takes the place of `nox.Session`."""

    name: str
    base: set[str]
    runs: list[Run] = field(default_factory=list)
    posargs: tuple[str, ...] = ()
    python: None = None

    def __post_init__(self) -> None:
        self.installed = set(self.base)
        self.folder = tempfile.mkdtemp()
        self.virtualenv = SimpleNamespace(location=self.folder)
        self.cache_dir = Path(self.folder, "cache")

    def install(self, *arguments: str) -> None:
        """Note projects; files of the workspace's wheels are theirs."""
        for one in arguments:
            if re.match(r"[A-Za-z]", one) and not one.endswith((".txt", "/")):
                self.installed.add(project_of(one))
            elif one.endswith(".whl"):
                self.installed.add(Path(one).name.split("-")[0].replace("_", "-"))

    def run(self, *command: str, **_: object) -> str:
        """Note a call of pytest."""
        if "pytest" in command and "--collect-only" not in command:
            words = list(command[command.index("pytest") + 1 :])
            for option in ("-c", "--rootdir"):  # a path, and none of tests
                if option in words:
                    del words[words.index(option) : words.index(option) + 2]
            chosen = words[words.index("-m") + 1] if "-m" in words else "not slow"
            paths = [os.path.relpath(Path(ROOT, one), ROOT) for one in words
                     if (ROOT / one).exists() and "tests" in one]  # fmt: skip
            self.runs.append(Run(self.name, self.installed, paths or DEFAULT, chosen))
        return ""

    def error(self, *words: object) -> None:
        """End the session."""
        raise RuntimeError(*words)

    skip = error
    chdir = staticmethod(lambda *_: nullcontext())
    log = warn = debug = staticmethod(lambda *_: None)


def sessions() -> list[Run]:
    """What every session of the noxfile runs that needs no wheel to be there."""
    importlib.import_module("noxfile")
    known = nox.registry.get()
    workspace = Noted("workspace", set())
    known["workspace"].func(workspace)
    found = []
    with (
        patch("shutil.which", return_value="there"),
        patch("shutil.rmtree"),
        patch.object(parts, "record_green", return_value=""),
    ):
        for name, one in known.items():
            if name == "matrix":  # asks nox itself
                continue
            ready = workspace.installed | OURS if one.venv_backend == "none" else set()
            noted = Noted(name, ready | BROUGHT.get(name, set()))
            # What wants what a build leaves runs a part of what others run.
            with suppress(RuntimeError, OSError, TypeError, subprocess.CalledProcessError):
                one.func(noted)
            found += noted.runs
    return found


def cases(folder: Path, *folders: str) -> list[dict[str, Any]]:
    """All cases below the folders, as `tools.collected_cases` writes them."""
    told = folder / "cases.json"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *folders]
    command += ["-p", "tools.collected_cases", "--collected", str(told), "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(told.read_text())
    return found


def without(runs: Sequence[Run], found: Sequence[dict[str, Any]]) -> list[str]:
    """The cases that no session runs with what they need, a line for each function."""
    lost = [one for one in found if not any(run.holds(one) for run in runs)]
    lines = {(one["id"].split("[")[0], *one["needs"], *one["marks"]): None for one in lost}
    return [" ".join(words) for words in lines]


@pytest.mark.slow
def test_each_case_has_a_session_with_what_it_needs(tmp_path):
    found = cases(tmp_path, *DEFAULT, "tests-integration")
    assert len(found) > 10_000
    lost = without(sessions(), found)
    assert not lost, "\n".join(lost)


def test_sessions_are_found_with_what_they_install_and_run():
    by_name = {one.session: one for one in sessions()}
    assert {"tests", "integration", "all_parts", "models", "ecosystem", "remote"} <= {*by_name}
    assert "transformers" in by_name["models"].installed
    assert "transformers" not in by_name["tests"].installed
    assert "vescale-rng" in by_name["tests"].installed
    assert by_name["tests"].folders == DEFAULT
    assert by_name["models"].chosen == "models and not slow"


FILE = """
import pytest
triton = pytest.importorskip("pytest")

@pytest.fixture
def server():
    pytest.importorskip("pytest", reason="s3fs is not installed")

@pytest.mark.models
@pytest.mark.skipif(False, reason="transformers or accelerate is not installed")
def test_one(): pass

def test_two(server): pass
"""


def test_a_case_that_no_session_runs_is_found(tmp_path):
    (tmp_path / "test_it.py").write_text(FILE)
    one, two = cases(tmp_path, str(tmp_path))
    assert one["needs"] == ["accelerate", "transformers"]
    assert one["marks"] == ["models", "skipif"]
    assert two["needs"] == ["s3fs"]
    runs = [Run("tests", {"s3fs"}, ["x"]), Run("models", {"transformers"}, ["x"], "models")]
    both = [{**one, "id": "x/t.py::one[1]"}, {**two, "id": "x/t.py::two"}]
    assert without(runs, both) == ["x/t.py::one accelerate transformers models skipif"]
    runs[1].installed.add("accelerate")
    assert not without(runs, both)
