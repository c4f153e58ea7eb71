"""Plant each fault of the tables, run the tests of its room, and say whether they found it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tools.packages import PACKAGES, ROOT
from tools.planted.faults import Fault, chosen
from tools.planted.report import ENOUGH, Result, share, tables, write
from tools.planted.sources import Sources
from tools.planted.trial import BOUND, Trial, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the status is 1 if too little is found."""
    options = _parser().parse_args(arguments)
    try:
        faults = chosen(options.package, options.room, options.only)
    except ValueError as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = SimpleQueue[Sources]()
        for job in range(options.jobs):
            copies.put(Sources(Path(folder, str(job))))
        copy = copies.get()
        copy.check()
        copies.put(copy)
        if options.clean:
            return _clean(faults, copies, options)
        return _plant(faults, copies, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.planted", description=__doc__)
    short = [package.short for package in PACKAGES]
    parser.add_argument("--package", nargs="+", default=[], choices=short, help="of these packages")
    parser.add_argument("--room", nargs="+", default=[], help="in these subpackages")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults")
    parser.add_argument("--jobs", type=int, default=1, help="runs of pytest at a time")
    parser.add_argument("--seconds", type=float, default=BOUND, help="the most for one fault")
    parser.add_argument("--all-cases", action="store_true", help='all tests, as with -m ""')
    parser.add_argument(
        "--confirm", action=argparse.BooleanOptionalAction, default=True,
        help="run what found a fault again without it: it must pass",
    )  # fmt: skip
    parser.add_argument("--clean", action="store_true", help="run the same tests without a fault")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results there")
    return parser


def _plant(faults: list[Fault], copies: SimpleQueue[Sources], options: argparse.Namespace) -> int:
    """Plant all, and print what was found."""

    def attempt(fault: Fault) -> Result:
        sources = copies.get()
        try:
            return _attempt(fault, sources, options)
        finally:
            copies.put(sources)

    results: list[Result] = []
    with _mapping(options.jobs) as each:
        for result in each(attempt, faults):
            results.append(result)
            print(f"[{len(results)}/{len(faults)}] {result.line}", flush=True)
            if options.out:  # as it goes: an hour's results outlive a run that is ended
                write(options.out, results)
    print(f"\n{tables(results)}")
    return 0 if share(results) >= ENOUGH else 1


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Give `map`, of several threads where there are several jobs."""
    if jobs == 1:
        yield map  # in this thread, which hears Ctrl-C and ends what it has started
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield pool.map


def _attempt(fault: Fault, sources: Sources, options: argparse.Namespace) -> Result:
    """Plant one fault, and run its tests in their order, until some find it."""
    marker = "" if options.all_cases else None
    seconds, by = 0.0, []
    with sources.with_fault(fault):
        for test in _paths(fault):
            trial = run(sources, [test], max(options.seconds - seconds, 1.0), marker)
            seconds += trial.seconds
            by.append(trial.by)
            if trial.found or trial.outcome == "out of time":
                break
    trial = Trial(trial.outcome, trial.by if trial.found else " ".join(by), trial.why, seconds)
    if not (options.confirm and trial.outcome == "failed"):
        return Result(fault, trial)
    again = run(sources, [trial.by], options.seconds, "")
    return Result(fault, trial, confirmed=again.outcome == "passed")


def _paths(fault: Fault) -> list[str]:
    """The tests of a fault, from the checkout."""
    below = fault.package.tests.relative_to(ROOT).as_posix()
    return [f"{below}/{test}" for test in fault.tests]


def _clean(
    faults: Iterable[Fault], copies: SimpleQueue[Sources], options: argparse.Namespace
) -> int:
    """Run the tests of all of these faults once on sound sources; the status is 1 if some fail."""
    named = dict.fromkeys(path for fault in faults for path in _paths(fault))
    # A file that also runs as part of its folder need not run twice.
    tests = [one for one in named if not any(str(up) in named for up in Path(one).parents)]
    marker, sound = "" if options.all_cases else None, True

    def attempt(test: str) -> Trial:
        sources = copies.get()
        try:
            return run(sources, [test], options.seconds, marker)
        finally:
            copies.put(sources)

    with _mapping(options.jobs) as each:
        for number, trial in enumerate(each(attempt, tests), 1):
            sound = sound and trial.outcome == "passed"
            place = f"[{number}/{len(tests)}] {trial.seconds:4.0f} s  {trial.outcome}"
            print(f"{place}: {trial.by} {trial.why}", flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
