"""The parts in which everything is run that a change does not run, and when each was last green.

`nox -s tests` runs the core; `nox -s all_parts -- 3/12` runs the third of twelve parts of the rest.
Which part a case belongs to follows from its name. tools/parts.txt says of each part at which
commit it was last green; a green part writes its line there.

    python -m tools.parts FILE...   take lines that other machines wrote into tools/parts.txt

Standard library only: the noxfile imports it before anything is installed.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.git import git
from tools.packages import ROOT

PARTS = 12
# A case with one of these marks is not in the core.
MARKS = ("slow", "models")
RECORD = ROOT / "tools" / "parts.txt"
# The line of the part that ran last here, for whoever collects the lines of several machines.
LATEST = ROOT / "runs" / "part.txt"
NEVER = "never green"
_HEAD = "# part, the commit at which it was last green, when, its cases, minutes it took\n"


@dataclass(frozen=True)
class Part:
    """The k-th of n parts of the cases that are not in the core, from 1 on."""

    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.k}/{self.n}"

    def holds(self, case: str) -> bool:
        """Whether a case belongs to this part; `case` is its id in pytest."""
        return zlib.crc32(case.encode()) % self.n == self.k - 1


EVERY = tuple(Part(k + 1, PARTS) for k in range(PARTS))


def parse_part(text: str) -> Part:
    """Read `3/12`.

    Raises:
        ValueError: it has another form, or there is no such part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"not the k-th of n parts, such as 3/{PARTS}: {text!r}")
    return Part(int(match[1]), int(match[2]))


def read_record(file: Path = RECORD) -> dict[str, str]:
    """What is known of each part: its commit, date, cases and minutes, or `never green`."""
    found = {str(part): NEVER for part in EVERY}
    for line in file.read_text().splitlines() if file.exists() else []:
        part, _, said = line.partition(" ")
        if part in found:
            found[part] = said.strip()
    return found


def take(files: Iterable[Path], record: Path = RECORD) -> None:
    """Put the lines of other runs into the record."""
    known = read_record(record)
    for file in files:
        known |= {part: said for part, said in read_record(file).items() if said != NEVER}
    record.write_text(_HEAD + "".join(f"{part} {said}\n" for part, said in known.items()))


def record_green(part: Part, cases: int, minutes: float) -> str:
    """Write into the record that a part is green at this commit; returns what to say of it."""
    if part.n != PARTS:
        return f"{part} is green; the record is of {PARTS} parts"
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!tools/{RECORD.name}"):
        return f"{part} is green, with changes that are not committed: not recorded"
    commit = git("rev-parse", "--short=12", "HEAD")
    line = f"{part} {commit} {datetime.now(UTC):%Y-%m-%d} {cases} cases {minutes:.0f} minutes"
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(f"{line}\n")
    take([LATEST])
    return f"{line}: written into {RECORD.relative_to(ROOT)}"


if __name__ == "__main__":
    take(map(Path, sys.argv[1:]))
