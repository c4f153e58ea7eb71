"""The report: what was found, for programs (JSON) and for people (Markdown, and a terminal)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tools.first_gpu import findings
from tools.first_gpu.catalogue import SECTIONS
from tools.first_gpu.findings import STATUSES, Finding
from tools.first_gpu.options import Options

_WIDEST: Final = 110
_VERSION: Final = 1
"""Of the form of report.json."""


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of the sections; a case that was begun and no more did not end."""
    known = {section.name: at for at, section in enumerate(SECTIONS)}
    ended = (
        replace(one, status=findings.UNFINISHED) if one.status == findings.BEGUN else one
        for one in found
    )
    return sorted(ended, key=lambda one: known.get(one.section, len(known)))


def status_counts(found: Iterable[Finding]) -> str:
    """How many cases have each status."""
    numbers = Counter(one.status for one in found)
    return ", ".join(f"{numbers[one]} {one}" for one in STATUSES if numbers[one]) or "nothing"


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        options: what was asked for.
        found: the findings, in the order of the sections.
        seconds: how long it took.
    """

    options: Options
    found: Sequence[Finding]
    seconds: float

    def to_json(self) -> str:
        """All of it."""
        cases = [{**asdict(one), "command": one.command(self.options.device)} for one in self.found]
        document: dict[str, Any] = {
            "version": _VERSION,
            "device": self.options.device,
            "minutes": self.options.minutes,
            "seconds": round(self.seconds, 1),
            "with": [file.name for file in self.options.first],
            "machine": dict(self._machine()),
            "summary": {one.name: dict(self._numbers(one.name)) for one in self.options.sections},
            "findings": cases,
        }
        return json.dumps(document, indent=1) + "\n"

    def to_markdown(self) -> str:
        """The page: what has to be looked at first, then all cases."""
        parts = [self._top()]
        for section in self.options.sections:
            rows = [
                (one.case, one.status, one.expected, one.got, f"{one.seconds:.1f}")
                for one in self.found
                if one.section == section.name
            ]
            head = ("case", "status", "expected", "got", "s")
            parts.append(f"## {section.name}: {section.title}\n\n{table(head, rows)}")
        traces = [one for one in self.found if one.bad and one.more]
        if traces:
            blocks = [
                f"{one.section}, {one.case}\n\n```text\n{_shortened(one.more)}\n```"
                for one in traces
            ]
            parts.append("## In full\n\n" + "\n\n".join(blocks))
        return "\n\n".join(parts) + "\n"

    def to_terminal(self, in_full: bool) -> str:
        """What is shown at the end: the top of the page, and where the rest is."""
        parts = [self._top()]
        if in_full:
            for one in self.found:
                parts.append(f"{one.section} / {one.case}: {one.status}: {one.got}\n{one.more}")
        parts.append(f"All cases: {self.options.out / 'report.md'}")
        return "\n\n".join(parts)

    def _top(self) -> str:
        head = f"{self.options.device}, {self.seconds:.0f} s of {self.options.minutes:g} minutes"
        parts = [f"# What this device says\n\n{head}: {status_counts(self.found)}."]
        bad = [one for one in self.found if one.bad]
        rows = [
            (one.section, one.case, one.status, one.expected, one.got, one.where,
             f"`{one.command(self.options.device)}`") for one in bad
        ]  # fmt: skip
        columns = ("section", "case", "status", "expected", "got", "where", "run it alone")
        text = table(columns, rows) if rows else "Everything that ran is as expected."
        parts.append(f"## To look at\n\n{text}")
        numbers = [
            (one.name, one.title, *(str(self._numbers(one.name)[s] or "") for s in STATUSES))
            for one in self.options.sections
        ]
        parts.append("## Sections\n\n" + table(("section", "about", *STATUSES), numbers))
        machine = [(case, got) for case, got in self._machine()]
        if machine:
            parts.append("## Machine\n\n" + table(("what", "is"), machine))
        missing = Counter(
            (one.section, one.got) for one in self.found if one.status == findings.CANNOT
        )
        if missing:
            rows_ = [(section, got, str(count)) for (section, got), count in missing.items()]
            parts.append("## Not here\n\n" + table(("section", "why", "cases"), rows_))
        figures = [
            (one.section, one.case, one.got)
            for one in self.found
            if one.status == findings.MEASURED and one.section != "machine"
        ]
        if figures:
            parts.append("## Figures\n\n" + table(("section", "case", "measured"), figures))
        return "\n\n".join(parts)

    def _machine(self) -> list[tuple[str, str]]:
        return [(one.case, one.got) for one in self.found if one.section == "machine"]

    def _numbers(self, section: str) -> Counter[str]:
        return Counter(one.status for one in self.found if one.section == section)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it can be read as it is."""
    shown = [[_cell(one) for one in row] for row in rows]
    widths = [max(len(row[at]) for row in [list(head), *shown]) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, shown)])


def _cell(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    code = flat.startswith("`")
    return flat if code or len(flat) <= _WIDEST else flat[: _WIDEST - 3] + "..."


def _shortened(text: str, lines: int = 60) -> str:
    """The beginning and the end of a long text."""
    all_lines = text.split("\n")
    if len(all_lines) <= lines:
        return text
    half = lines // 2
    return "\n".join([*all_lines[:half], "...", *all_lines[-half:]])
