"""Copies of the packages' sources, in which one file at a time is another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

from tools.packages import PACKAGES, ROOT
from tools.planted.faults import Fault
from tools.steps import TEST_ENV


class Sources:
    """All packages' sources, copied to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package.source, folder, ignore=ignored, dirs_exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Python, and what it starts, imports the copies."""
        wanted = {**os.environ, **TEST_ENV}  # None: not there
        env = {name: value for name, value in wanted.items() if value is not None}
        # Wide enough that pytest cuts no name of a test short.
        return {**env, "PYTHONPATH": str(self.folder), "COLUMNS": "500", "PYTHONUNBUFFERED": "1"}

    def check(self) -> None:
        """Start a process that imports every package, and ask it where they lie.

        Raises:
            RuntimeError: one is imported from elsewhere.
        """
        names = [package.module for package in PACKAGES]
        code = f"import importlib as i; [print(i.import_module(n).__file__) for n in {names}]"
        command = [sys.executable, "-c", code]
        ran = subprocess.run(
            command, env=self.env, cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name, line in zip(names, ran.stdout.split("\n"), strict=False):
            if not Path(line).is_relative_to(self.folder):
                raise RuntimeError(f"{name} is imported from {line}, not from {self.folder}")

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Plant a fault; take it out at the end."""
        path = self.folder / fault.path
        sound = path.read_text(encoding="utf-8")
        faulty = fault.planted(sound)
        try:
            _replace(path, faulty)
            yield
        finally:
            _replace(path, sound)


def _replace(path: Path, text: str) -> None:
    """Write a source file, and drop its bytecode: of the same size and second, it would stay."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
