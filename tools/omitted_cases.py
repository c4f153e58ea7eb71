"""A plugin of pytest that says which cases a run of the core left out (`-p tools.omitted_cases`).

With `--part 3/12` it keeps only what belongs to that part: `tools.parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tools.packages import ROOT
from tools.parts import MARKS, parse_part, read_record

NAMES = ROOT / "runs" / "left_out.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`."""
    said = "of the cases that are collected only those of the k-th of n parts"
    parser.addoption("--part", type=parse_part, metavar="K/N", help=said)


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch what is collected."""
    config.pluginmanager.register(LeftOut())


class LeftOut:
    """What was collected, and what of it is not in the core."""

    def __init__(self) -> None:
        self.cases: list[str] = []
        self.collected: Mapping[str, int] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Note what is not in the core; keep what belongs to the part."""
        marked = [item for item in items if any(map(item.get_closest_marker, MARKS))]
        self.cases = [item.nodeid for item in marked]
        self.collected = Counter(file_of(item.nodeid) for item in items)
        part = config.getoption("part")
        if part is not None:
            gone = [item for item in items if not part.holds(item.nodeid)]
            items[:] = [item for item in items if part.holds(item.nodeid)]
            config.hook.pytest_deselected(items=gone)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand on what a worker of xdist has collected: they all collect the same."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = self.cases, dict(self.collected)

    @pytest.hookimpl(optionalhook=True)  # it is xdist's
    def pytest_testnodedown(self, node: Any) -> None:
        """Take it over."""
        self.cases, self.collected = getattr(node, "workeroutput", {}).get(
            "left_out", (self.cases, self.collected)
        )

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say it, where cases were left out for not being in the core."""
        if self.cases and "not slow" in config.getoption("markexpr"):
            for line in report(self.cases, self.collected, read_record()):
                terminalreporter.write_line(line)
            NAMES.parent.mkdir(exist_ok=True)
            NAMES.write_text("\n".join(self.cases) + "\n")


def file_of(case: str) -> str:
    """The file of a case, by its id."""
    return case.split("::")[0]


def report(
    cases: Sequence[str], collected: Mapping[str, int], record: Mapping[str, str]
) -> list[str]:
    """The lines that say which cases did not run, and when they last did.

    Args:
        cases: ids of those that are not in the core.
        collected: how many cases each file has.
        record: what is known of each part.
    """
    files = Counter(map(file_of, cases))
    lines = [f"not in the core, so not run: {len(cases)} of {sum(collected.values())} cases"]
    lines += [f"  {count} of {collected[file]}  {file}" for file, count in files.items()]
    lines.append(f"by name in {NAMES.relative_to(ROOT)}; when each part of them was last green:")
    lines += [f"  nox -s all_parts -- {part}  {said}" for part, said in record.items()]
    return lines
