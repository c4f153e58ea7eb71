"""Writes what was found, as tables and as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.planted.faults import Fault
from tools.planted.trial import Trial

ENOUGH = 0.95


@dataclass(frozen=True)
class Result:
    """A fault, and what became of the tests that were to find it."""

    fault: Fault
    trial: Trial
    # The test that found it passes without it; None where nobody looked.
    confirmed: bool | None = None

    @property
    def found(self) -> bool:
        """Whether the tests found the fault, and nothing else."""
        return self.trial.found and self.confirmed is not False

    @property
    def line(self) -> str:
        """One line for a person to read."""
        word = "found" if self.found else "MISSED"
        if self.confirmed is False:
            word = "FAILS WITHOUT IT"
        place = f"{self.fault.package.short}/{self.fault.room}"
        seconds = f"{self.trial.seconds:4.0f} s"
        return f"{word:6} {seconds}  {place:26} {self.fault.name}: {self.trial.outcome}, {self.by}"

    @property
    def by(self) -> str:
        """The test that found it, from the package's tests on."""
        return self.trial.by.replace(f"packages/{self.fault.package.name}/tests/", "")

    def as_json(self) -> dict[str, Any]:
        """All of it, as data."""
        fault, trial = self.fault, self.trial
        return {
            "package": fault.package.short,
            "room": fault.room,
            "rule": fault.rule,
            "name": fault.name,
            "found": self.found,
            "outcome": trial.outcome,
            "by": self.by,
            "why": trial.why[:200],
            "confirmed": self.confirmed,
            "seconds": round(trial.seconds, 1),
        }


def share(results: Iterable[Result]) -> float:
    """Return what part of the faults was found."""
    found = [one.found for one in results]
    return sum(found) / len(found) if found else 1.0


def tables(results: list[Result]) -> str:
    """Return found / planted by rule and by room, and the names of what was missed."""
    by_rule = _table("rule", results, lambda one: one.fault.rule)
    by_room = _table("room", results, lambda one: f"{one.fault.package.short}/{one.fault.room}")
    missed = [f"  {one.line}" for one in results if not one.found]
    seconds = sum(one.trial.seconds for one in results)
    total = f"{sum(one.found for one in results)} of {len(results)} found ({share(results):.1%})"
    ending = [f"\n{total} in {seconds / 60:.0f} min"]
    return "\n".join([*by_room, "", *by_rule, *ending, *(["missed:"] if missed else []), *missed])


def _table(title: str, results: list[Result], key: Callable[[Result], str]) -> list[str]:
    rows = defaultdict[str, list[Result]](list)
    for one in results:
        rows[key(one)].append(one)
    head = f"{title:34} found  planted  seconds"
    lines = [
        f"{name:34} {sum(one.found for one in row):5}  {len(row):7}"
        f"  {sum(one.trial.seconds for one in row):7.0f}"
        for name, row in rows.items()
    ]
    return [head, *lines]


def write(path: Path, results: list[Result]) -> None:
    """Write the results as JSON."""
    rows = [one.as_json() for one in results]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
