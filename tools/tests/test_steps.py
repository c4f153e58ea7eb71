"""Steps of sessions, asked without running any."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools import steps


def session(tmp_path: Path, python: str | None) -> Any:
    location = tmp_path / ".nox" / "workspace"
    virtualenv = SimpleNamespace(location=str(location))
    return SimpleNamespace(
        cache_dir=tmp_path / ".nox" / ".cache", python=python, virtualenv=virtualenv
    )


def test_a_forced_python_has_an_environment_of_its_own(tmp_path: Path):
    usual, forced = (Path(steps.python_of(session(tmp_path, one))) for one in (None, "3.13"))
    assert usual == tmp_path / ".nox" / "workspace" / "bin" / "python"
    assert forced == tmp_path / ".nox" / "workspace-3-13" / "bin" / "python"


def test_what_is_installed_again_is_installed_at_another_time(tmp_path: Path):
    here = session(tmp_path, None)
    assert steps.installed_at(here) == []
    folder = tmp_path / ".nox/workspace/lib/python3.12/site-packages/vescale_rng-0.1.0.dist-info"
    folder.mkdir(parents=True)
    before = steps.installed_at(here)
    assert len(before) == 1
    os.utime(folder, ns=(0, 5))
    assert steps.installed_at(here) == [5] != before
