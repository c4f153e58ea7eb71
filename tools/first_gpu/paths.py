"""Finds the folders of the checkout, and the paths of the processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.packages import PACKAGES, ROOT, find

# What a launcher sets would be taken for this process's own rank.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def of_checkout(file: str) -> Path | None:
    """Where a file lies in the checkout; None for others', also if installed below it."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return None
    return path.relative_to(ROOT)


def sources() -> list[str]:
    """What makes the packages and the tools importable, without an installation."""
    return [str(ROOT), *(str(package.source) for package in PACKAGES)]


def use_sources() -> None:
    """Put them on the path of this process, before what may be installed."""
    sys.path[:0] = [one for one in sources() if one not in sys.path]


def of_tests(package: str, module: str) -> Any:
    """Import a helper module of a package's tests: what both compare is written there."""
    tests = find(package).tests
    for folder in (tests, tests / "support"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return import_module(module)


def environment(given: Mapping[str, str], *, cuda: bool, interpreted: bool) -> dict[str, str]:
    """The variables of a section's process.

    Args:
        given: those of this process.
        cuda: whether it runs on a GPU.
        interpreted: whether Triton's kernels are run by its interpreter, which is asked for before
            triton is imported, and then replaces every kernel.
    """
    made = {name: value for name, value in given.items() if name not in _LAUNCHERS}
    before = [one for one in (given.get("PYTHONPATH"),) if one]
    made["PYTHONPATH"] = os.pathsep.join([*sources(), *before])
    made["PYTHONUNBUFFERED"] = "1"
    made.pop("TRITON_INTERPRET", None)
    if interpreted:
        made["TRITON_INTERPRET"] = "1"
    if not cuda:
        # Sections run beside each other, and what they compute is small.
        made["OMP_NUM_THREADS"] = "1"
        made["CUDA_VISIBLE_DEVICES"] = ""
    return made
