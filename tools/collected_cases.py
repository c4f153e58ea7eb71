"""Lets pytest write which cases it collects, with marks and needs (`-p tools.collected_cases`).

What a case needs beside torch is read from the reasons for which it would be skipped: its own, its
fixtures', its file's. A file that cannot be collected for want of something counts as one case.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_REASON = re.compile(r"([\w.-]+(?:(?: or |, )[\w.-]+)*) is not installed")
_SKIPPING = ("pytest.skip", "pytest.importorskip")
_IMPORT = re.compile(r"importorskip\(\s*['\"]([\w.]+)['\"]\s*\)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--collected`."""
    parser.addoption("--collected", type=Path, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch what is collected."""
    config.pluginmanager.register(CollectedCases())


class CollectedCases:
    """The cases, as they come."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note the functions of a file that is skipped as a whole."""
        if report.skipped and report.nodeid.endswith(".py"):
            self.cases += unread(report.nodeid, Path(str(report.fspath)).read_text())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write all that there is."""
        for item in session.items:
            marks = sorted({one.name for one in item.iter_markers()} - {"parametrize"})
            found = {"id": item.nodeid, "marks": marks, "needs": needs(texts(item))}
            self.cases.append(found)
        session.config.getoption("--collected").write_text(json.dumps(self.cases))


def unread(name: str, text: str) -> Iterator[dict[str, Any]]:
    """The cases of a file that cannot be imported here, a function each."""
    tree = ast.parse(text)
    shared = [ast.unparse(node) for node in tree.body if "pytestmark" in ast.unparse(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marked = " ".join([*shared, *map(ast.unparse, node.decorator_list)])
            marks = sorted({*re.findall(r"pytest\.mark\.(\w+)", marked)} - {"parametrize"})
            said = [*_top(text), *_skips(ast.unparse(node)), marked]
            yield {"id": f"{name}::{node.name}", "marks": marks, "needs": needs(said)}


def texts(item: pytest.Item) -> Iterator[str]:
    """All that could say why a case is skipped."""
    for mark in item.iter_markers("skipif"):
        yield str(mark.kwargs.get("reason", ""))
    functions = [getattr(item, "function", None)]
    known = getattr(item, "_fixtureinfo", None)
    for found in (known.name2fixturedefs if known is not None else {}).values():
        functions += [one.func for one in found]
    for one in functions:
        if one is not None and "site-packages" not in inspect.getfile(one):
            yield from _of_function(inspect.unwrap(one))
    yield from _of_file(item.path)


@cache
def _of_function(function: Any) -> tuple[str, ...]:
    return tuple(_skips(textwrap.dedent(inspect.getsource(function))))


@cache
def _of_file(path: Path) -> tuple[str, ...]:
    return tuple(_top(path.read_text()))


def _skips(source: str) -> Iterator[str]:
    """The calls of a function that skip."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _SKIPPING:
            yield ast.unparse(node)


def _top(text: str) -> Iterator[str]:
    """What a file skips before its first function."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr | ast.Assign):
            yield from _skips(ast.unparse(node))


def needs(words: Iterable[str]) -> list[str]:
    """The projects that these texts miss."""
    found: set[str] = set()
    for text in words:
        for names in _REASON.findall(text):
            found.update(re.split(r" or |, ", names))
        found.update(name.split(".")[0].replace("_", "-") for name in _IMPORT.findall(text))
    return sorted(found - {"pytest"})
