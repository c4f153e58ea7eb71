"""What all integration tests share.

Each file runs wherever the packages that it imports are installed: under `nox -s integration`
that is everywhere; under `nox -s subsets` it is in every set of wheels that holds them. A file
that needs more than is there is left out, by name, in the header of the run.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Helpers of several tests are imported by name, and the main job from tools/; importlib mode puts
# no folder on the path.
sys.path[:0] = [str(HERE), str(HERE.parent)]


def _absent(path: Path) -> set[str]:
    """The packages of this workspace that a file needs, by its helpers too, and that are absent."""
    tree = ast.parse(path.read_text(), str(path))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}  # fmt: skip
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    family = {name.split(".", 1)[0] for name in names if name.startswith("vescale_")}
    helpers = [HERE / f"{name}.py" for name in names if (HERE / f"{name}.py").exists()]
    gone = {name for name in family if find_spec(name) is None}
    return gone.union(*map(_absent, helpers))


LEFT_OUT = {path.name: absent for path in HERE.glob("test_*.py") if (absent := _absent(path))}
collect_ignore = sorted(LEFT_OUT)


def pytest_addoption(parser: pytest.Parser) -> None:
    sweep = parser.getgroup("the OpInfo sweep")
    sweep.addoption("--opinfo-all", action="store_true", help="run all entries, not only a part")
    sweep.addoption("--opinfo-seed", type=int, default=0, help="what draws the part")
    sweep.addoption(
        "--opinfo-only", action="append", default=[], help="an entry, or part of a name; repeatable"
    )


def pytest_report_header() -> list[str]:
    return [f"{name} left out: no {', '.join(sorted(gone))}" for name, gone in LEFT_OUT.items()]


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    needed = 2 if item.get_closest_marker("multigpu") else 1
    wants_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")
    if wants_gpu and torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices, found {torch.cuda.device_count()}")
