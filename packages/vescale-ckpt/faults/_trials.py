"""What became of one fault: the words of the table, and how they are decided."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from _processes import Ended, run
from _systems import System, number_of, state_of, template

# From best to worst.
INTACT, CAUGHT, HUNG, LOST, SILENT = "intact", "caught", "hung", "lost", "silent"
ORDER = (INTACT, CAUGHT, HUNG, LOST, SILENT)


@dataclass(frozen=True)
class Trial:
    """One fault that was made to happen: where, and what came of it."""

    where: str
    verdict: str
    because: str = ""


@dataclass(frozen=True)
class Cell:
    """All trials of one fault with one system."""

    trials: list[Trial]

    @property
    def worst(self) -> str:
        return max((trial.verdict for trial in self.trials), key=ORDER.index)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(trial.verdict for trial in self.trials)
        return {word: found[word] for word in reversed(ORDER) if found[word]}


class Bench:
    """A folder for one system's trials."""

    def __init__(self, system: System, folder: str) -> None:
        self.system, self.folder = system, folder
        self.made = self.groups = 0

    def path(self) -> str:
        """A place for a checkpoint that nothing has touched."""
        self.made += 1
        return f"{self.folder}/{self.made}/run/step"

    def saved(self, number: int) -> str:
        """The path of a healthy checkpoint."""
        path = self.path()
        ended = run(lambda: self.system.save(path, state_of(number)))
        if ended.how != "returned":
            raise AssertionError(f"{self.system.name} cannot save at all: {ended}")
        return path

    def copied(self, original: str) -> str:
        """A copy of a checkpoint, to be damaged."""
        path = self.path()
        shutil.copytree(original, path)
        return path

    def load(self, path: str) -> Ended:
        """Load in a process of its own: the number of the save that it is, or None."""
        return run(lambda: number_of(self.system.load(path, template())))


def files_in(path: str) -> Iterator[str]:
    """All files of a checkpoint."""
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in sorted(names))


def after_damage(ended: Ended, expected: int) -> tuple[str, str]:
    """A committed checkpoint was damaged behind its back: it must say so, or not matter."""
    if ended.how == "returned":
        return (INTACT, "") if ended.value == expected else (SILENT, "loads something else")
    return CAUGHT, ended.raised or ended.how


def after_crash(loaded: Ended, old: int | None, new: int) -> tuple[str, str]:
    """A save was killed: what it was to replace must be there, or the new one, whole."""
    if loaded.how == "returned":
        if loaded.value in (old, new) and loaded.value is not None:
            return INTACT, f"save {loaded.value}"
        return SILENT, "loads a mixture of two saves" if old else "loads what was never committed"
    if old is None:
        return CAUGHT, loaded.raised
    return LOST, f"neither loads: {loaded.raised}"


def after_failure(saved: Ended, loaded: Ended, old: int, new: int) -> tuple[str, str]:
    """Something failed during a save: it must say so, and leave what was there."""
    if saved.how == "returned":
        if loaded.value == new:
            return INTACT, ""
        return SILENT, f"save() succeeded; loading then: {loaded.raised or loaded.value}"
    verdict, because = after_crash(loaded, old, new)
    return (CAUGHT, saved.raised or saved.how) if verdict == INTACT else (verdict, because)
