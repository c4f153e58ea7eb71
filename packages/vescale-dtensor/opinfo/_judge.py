"""All trials of one entry, on four simulated ranks: what passed, fell back, went wrong."""

from __future__ import annotations

import random
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import vescale_dtensor
from _entries import dtype_of, entries, samples
from _forms import trials
from _places import MESHES, scenarios
from _trial import RAISED, WRONG, Trial, WrongError, quiet, reference, run
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor._plan import function_name
from vescale_dtensor._watch import Watcher, watching

RANKS = 4
MOST_FAILURES = 12

UNINITIALISED = frozenset({"empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_"})


@dataclass
class Verdict:
    """What was found of one entry in one library.

    Attributes:
        status: `passed`, `wrong`, `raised`, `plain` (it takes no tensor), `not on CPU`; the parent
            adds `hung` and `crashed`.
        trials, failed: how many.
        native: how many trials, by kind of scenario, ran without a fallback; and of how many.
        fallbacks: functions that fell back.
        failures: the first of them, in words.
        forms: those that were tried.
        draws: whether it draws random numbers.
    """

    name: str
    status: str
    trials: int = 0
    failed: int = 0
    native: dict[str, list[int]] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    draws: bool = False


@dataclass
class Effort:
    """How much is tried: samples an entry, whether to stop at the first failure, and the seed."""

    samples: int
    seed: int
    first_only: bool = False


class _Noted(Watcher):
    """The functions that fell back, by trial; every rank is a thread, and says what it is at."""

    def __init__(self) -> None:
        self.functions: dict[int, set[str]] = {}
        self.at = threading.local()

    def fell_back(self, call: Any) -> None:
        self.functions.setdefault(self.at.index, set()).add(function_name(call.func))


def judge(name: str, library: ModuleType, effort: Effort, told: Callable[[str], None]) -> Verdict:
    """Try an entry. `told` hears of every trial before it runs."""
    if dtype_of(entries()[name]) is None:
        return Verdict(name, "not on CPU")
    made = list(_made(name, effort))
    if not made:
        takes = any(s.tensors() for s in samples(name, effort.samples, effort.seed))
        return Verdict(name, "not on CPU" if takes else "plain")
    verdict = Verdict(name, "passed", forms=list(dict.fromkeys(t.form.name for t in made)))
    verdict.draws = any(t.reference.draws for t in made)
    ours = library is vescale_dtensor
    _tried(made, _Runner(library, told, watched=ours), verdict, effort)
    if ours and not verdict.failed:
        # By the short road, which nobody may watch, too: twice, as the first call paves it.
        _tried(
            made[::3], _Runner(library, told, 2, watched=False), short := Verdict(name, ""), effort
        )
        verdict.failed, verdict.failures = short.failed, short.failures
    if verdict.failed:
        kinds = [failure["kind"] for failure in verdict.failures]
        verdict.status = WRONG if WRONG in kinds else RAISED
    return verdict


def _made(name: str, effort: Effort) -> Iterator[Trial]:
    """The trials of an entry: only such calls as plain torch takes."""
    entry, found = entries()[name], samples(name, effort.samples, effort.seed)
    chosen = random.Random(zlib.crc32(f"{name} {effort.seed}".encode()))
    for index, form, everywhere in trials(entry, found, chosen):
        sample = found[index]
        tensors = sample.tensors()
        places = list(scenarios(tensors, chosen)) if tensors else []
        places = places if everywhere or not places else [chosen.choice(places)]
        seed = chosen.randrange(1 << 30)
        answer = reference(sample, form, seed)
        if answer is None:
            continue
        for place in places:
            label = f"sample {index} {form.name} {place}"
            yield Trial(sample, form, place, answer, label, seed, name not in UNINITIALISED)


def _tried(made: list[Trial], run_all: _Runner, verdict: Verdict, effort: Effort) -> None:
    """Run all trials; a simulation ends at a failure, and another goes on behind it."""
    start = 0
    while start < len(made):
        batch = made[start:]
        done, failure, noted = run_all(batch)
        for index, trial in enumerate(batch[:done]):
            counts = verdict.native.setdefault(trial.scenario.kind, [0, 0])
            counts[0] += index not in noted
            counts[1] += 1
        functions = set().union(*noted.values()) if noted else set()
        verdict.fallbacks = sorted({*verdict.fallbacks, *functions})
        verdict.trials += done + (failure is not None)
        start += done + 1
        if failure is not None:
            verdict.failed += 1
            verdict.failures.append(failure)
            if effort.first_only or verdict.failed >= MOST_FAILURES:
                return


@dataclass(frozen=True)
class _Runner:
    """Runs trials until one fails: how many passed, the failure, and the fallbacks by trial."""

    library: ModuleType
    told: Callable[[str], None]
    times: int = 1
    watched: bool = True

    def __call__(
        self, batch: list[Trial]
    ) -> tuple[int, dict[str, str] | None, dict[int, set[str]]]:
        noted = _Noted()
        with watching(noted) if self.watched else nullcontext():
            values = simulate(RANKS).run(self._program, batch, noted)
        done = min(passed for passed, _ in values)
        return done, _failure(batch, done, [error for _, error in values]), noted.functions

    def _program(
        self, rank: int, world_size: int, batch: list[Trial], noted: _Noted
    ) -> tuple[int, dict[str, str] | None]:
        """One rank: how many trials passed, and what the next one said."""
        with quiet():
            for index, trial in enumerate(batch):
                noted.at.index = index
                if rank == 0:
                    self.told(trial.label)
                try:
                    for _ in range(self.times):
                        run(trial, self.library, device_mesh(MESHES[trial.scenario.mesh]))
                except Exception as error:
                    return index, _described(error)
        return len(batch), None


def _failure(
    batch: list[Trial], done: int, errors: list[dict[str, str] | None]
) -> dict[str, str] | None:
    """The failure of the rank that went wrong by itself, not of those that then waited."""
    found = [error for error in errors if error is not None]
    if not found:
        return None
    found.sort(key=lambda f: (f["error"].startswith(_WAITED), f["kind"] != WRONG))
    return {"trial": batch[done].label, "ranks": str(len(found)), **found[0]}


_WAITED = ("DeadlockError", "CommMismatchError")


def _described(error: Exception) -> dict[str, str]:
    kind = WRONG if isinstance(error, WrongError) else RAISED
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "" if kind == WRONG or not frames else f" ({frames[0].name})"
    words = " ".join(str(error).split())[:400]
    return {"kind": kind, "error": f"{type(error).__name__}: {words}{where}"}
