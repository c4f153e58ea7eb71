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

import torch
import vescale_dtensor
from _entries import Sample, dtype_of, entries, samples
from _forms import forms, trials
from _places import MESHES, distributed, own_scenarios, scenarios
from _trial import RAISED, WRONG, Trial, WrongError, full_value, quiet, reference, run
from torch import Tensor
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor._dispatch.observers import CallObserver
from vescale_dtensor._inspect.op_support import public_name
from vescale_dtensor._tensor.observers import observing

RANKS = 4
MOST_FAILURES = 12

# Only shapes and dtypes are compared of what nobody has written to.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)
_WINDOW = "a window on the storage of one device, which no rank has: refused, by name"
_RESIZED = "changes the storage under other views of one device: refused, by name"
EXCLUDED = {
    "as_strided": _WINDOW,
    "as_strided.partial_views": _WINDOW,
    "as_strided_copy": _WINDOW,
    "as_strided_scatter": _WINDOW,
    "resize_": _RESIZED,
    "resize_as_": _RESIZED,
}
"""Entries that are not run, and why."""


@dataclass
class Verdict:
    """What was found of one entry in one library.

    Attributes:
        status: `passed`, `wrong`, `raised`, `plain` (it takes no tensor), `excluded`, `not on CPU`;
            the parent adds `hung` and `crashed`.
        trials, failed: how many.
        native: how many trials, by kind of scenario, ran without a fallback; and of how many.
        fallbacks: functions that fell back.
        failures: the first of them, in words.
        forms: those that were tried.
        draws: whether it draws random numbers.
        functions: see `_Noted`.
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
    functions: dict[str, dict[str, list[int]]] = field(default_factory=dict)


@dataclass
class Effort:
    """How much is tried.

    Attributes:
        samples: of an entry, at most.
        seed: of all that is drawn.
        first_only: whether to stop at the first failure.
        spelled_only: whether to try no other forms than those that name all arguments.
    """

    samples: int
    seed: int
    first_only: bool = False
    spelled_only: bool = False


class _Noted(CallObserver):
    """What ran by a rule and what fell back; every rank is a thread, and says what it is at.

    Attributes:
        fallbacks: functions that fell back, by trial.
        functions: of rank 0: by function, by placements of the operands, how many calls ran by a
            rule, and of how many.
    """

    def __init__(self) -> None:
        self.fallbacks: dict[int, set[str]] = {}
        self.functions: dict[str, dict[str, list[int]]] = {}
        self.at = threading.local()

    def on_plan(self, call: Any, plan: Any) -> None:
        self._count(call, 1)

    def on_fallback(self, call: Any) -> None:
        self.fallbacks.setdefault(self.at.index, set()).add(public_name(call.func))
        self._count(call, 0)

    def _count(self, call: Any, native: int) -> None:
        placed = _placed(call)
        if self.at.rank == 0 and placed:
            kinds = self.functions.setdefault(public_name(call.func), {})
            counts = kinds.setdefault(placed, [0, 0])
            counts[0] += native
            counts[1] += 1


def _placed(call: Any) -> str:
    """Placements of a call's operands: `shard`, `partial`, `both`; empty if all are replicated."""
    placements = [
        p for o in call.operands if isinstance(o, vescale_dtensor.DTensor) for p in o.placements
    ]
    sharded = any(p.is_shard() for p in placements)
    if any(p.is_partial() for p in placements):
        return "both" if sharded else "partial"
    return "shard" if sharded else ""


def judge(name: str, library: ModuleType, effort: Effort, told: Callable[[str], None]) -> Verdict:
    """Try an entry. `told` hears of every trial before it runs."""
    if dtype_of(entries()[name]) is None:
        return Verdict(name, "not on CPU")
    if name in EXCLUDED:
        return Verdict(name, "excluded")
    found = samples(name, effort.samples, effort.seed)
    if not any(sample.tensors() for sample in found):
        return _joined(name, found, library, effort)
    ours = library is vescale_dtensor
    made = list(_made(name, found, effort, ours))
    if not made:
        return Verdict(name, "not on CPU")
    verdict = Verdict(name, "passed", forms=list(dict.fromkeys(t.form.name for t in made)))
    verdict.draws = any(t.reference.draws for t in made)
    _tried(made, _Runner(library, told, watched=ours), verdict, effort)
    if ours and not verdict.failed:
        # On the fast path, too, which no observer sees: twice, as the first call compiles it.
        _tried(
            made[::3], _Runner(library, told, 2, watched=False), short := Verdict(name, ""), effort
        )
        verdict.failed, verdict.failures = short.failed, short.failures
    if verdict.failed:
        kinds = [failure["kind"] for failure in verdict.failures]
        verdict.status = WRONG if WRONG in kinds else RAISED
    return verdict


def _joined(name: str, found: list[Sample], library: ModuleType, effort: Effort) -> Verdict:
    """An entry that takes no tensor: its result is plain, and counts as replicated among others."""
    verdict = Verdict(name, "plain")
    if library is not vescale_dtensor:
        return verdict

    def program(rank: int, world_size: int, result: Tensor) -> Tensor:
        mesh, placements = device_mesh(MESHES["line"]), ("S0" if result.ndim else "R",)
        zeros = distributed(library, torch.zeros_like(result), mesh, placements, 0)
        return full_value(zeros + result)

    for sample in found if name not in UNINITIALISED else ():
        answer = reference(sample, forms(entries()[name])[0], effort.seed)
        result = None if answer is None else answer.result
        if isinstance(result, Tensor):
            verdict.trials += 1
            for each in simulate(RANKS).run(program, result):
                torch.testing.assert_close(each, result, rtol=0, atol=0, equal_nan=True)
    return verdict


def _made(name: str, found: list[Sample], effort: Effort, ours: bool) -> Iterator[Trial]:
    """The trials of an entry: only such calls as plain torch takes."""
    entry = entries()[name]
    chosen = random.Random(zlib.crc32(f"{name} {effort.seed}".encode()))
    others = random.Random(effort.seed)
    for index, form, everywhere in trials(entry, found, chosen):
        if effort.spelled_only and not form.spelled:
            continue
        sample = found[index]
        tensors = sample.tensors()
        places = list(scenarios(tensors, chosen)) if tensors else []
        places = places if everywhere or not places else [chosen.choice(places)]
        seed = chosen.randrange(1 << 30)
        if ours and tensors:
            more = list(own_scenarios(tensors, others))
            places += more if everywhere else [others.choice(more)]
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
            counts[0] += index not in noted.fallbacks
            counts[1] += 1
        verdict.fallbacks = sorted(set(verdict.fallbacks).union(*noted.fallbacks.values()))
        add_up(verdict.functions, noted.functions)
        verdict.trials += done + (failure is not None)
        start += done + 1
        if failure is not None:
            verdict.failed += 1
            verdict.failures.append(failure)
            if effort.first_only or verdict.failed >= MOST_FAILURES:
                return


def add_up(total: dict[str, dict[str, list[int]]], more: dict[str, dict[str, list[int]]]) -> None:
    """Add counts by function and placements to others."""
    for function, kinds in more.items():
        for kind, counts in kinds.items():
            known = total.setdefault(function, {}).setdefault(kind, [0, 0])
            known[:] = [a + b for a, b in zip(known, counts, strict=True)]


@dataclass(frozen=True)
class _Runner:
    """Runs trials until one fails: how many passed, the failure, and the fallbacks by trial."""

    library: ModuleType
    told: Callable[[str], None]
    times: int = 1
    watched: bool = True

    def __call__(self, batch: list[Trial]) -> tuple[int, dict[str, str] | None, _Noted]:
        noted = _Noted()
        with observing(noted) if self.watched else nullcontext():
            values = simulate(RANKS).run(self._program, batch, noted)
        done = min(passed for passed, _ in values)
        return done, _failure(batch, done, [error for _, error in values]), noted

    def _program(
        self, rank: int, world_size: int, batch: list[Trial], noted: _Noted
    ) -> tuple[int, dict[str, str] | None]:
        """One rank: how many trials passed, and what the next one said."""
        with quiet():
            for index, trial in enumerate(batch):
                noted.at.index, noted.at.rank = index, rank
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
