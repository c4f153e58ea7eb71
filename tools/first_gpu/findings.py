"""Defines what a case found: one line of the report, and one of a file meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

FINE: Final = "fine"
MEASURED: Final = "measured"
DIFFERS: Final = "DIFFERS"
RAISED: Final = "RAISED"
HUNG: Final = "HUNG"
DIED: Final = "DIED"
UNFINISHED: Final = "unfinished"
NOT_REACHED: Final = "not reached"
CANNOT: Final = "cannot run here"
BEGUN: Final = "begun"
"""Of the file only: a case that runs. What is left at its end did not come to an end."""

BAD: Final = (DIFFERS, RAISED, HUNG, DIED)
"""What somebody has to look at; the exit status is 1 if there is any."""

STATUSES: Final = (*BAD, FINE, MEASURED, UNFINISHED, NOT_REACHED, CANNOT)

_COMMAND: Final = "python -m tools.first_gpu"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
        section: name of the section.
        case: name of the case.
        status: one of `STATUSES`.
        expected: what was expected, in words.
        got: what was there, in words.
        seconds: how long it took; of one that has begun, how much longer than others it may take.
        where: file and line, where it raised, died or hung.
        more: what does not fit on a line: a traceback, stacks, numbers.
    """

    section: str
    case: str
    status: str
    expected: str = ""
    got: str = ""
    seconds: float = 0.0
    where: str = ""
    more: str = ""

    @property
    def bad(self) -> bool:
        """Whether somebody has to look at it."""
        return self.status in BAD

    def command(self, device: str) -> str:
        """How to run it alone."""
        return f'{_COMMAND} --device {device} --only {self.section} --case "{self.case}"'


def append(path: Path, finding: Finding) -> None:
    """Write a finding to the end of a file that several processes write to, in one piece."""
    line = json.dumps(asdict(finding)) + "\n"
    # One call, and no buffer that a crash would take along.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: Path) -> list[Finding]:
    """All findings of a file, in order; a line that is half written is left out."""
    if not path.exists():
        return []
    return list(_parsed(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]))


def _parsed(lines: Iterable[str]) -> Iterator[Finding]:
    for line in lines:
        known: dict[str, Any] = json.loads(line)
        yield Finding(**known)


def latest(findings: Iterable[Finding]) -> list[Finding]:
    """The last word on each case, in the order in which cases were first mentioned."""
    found: dict[tuple[str, str], Finding] = {}
    for one in findings:
        found[one.section, one.case] = one
    return list(found.values())
