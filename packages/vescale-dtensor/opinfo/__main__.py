"""The OpInfo sweep: every entry of torch's operator database, sharded, against one device.

    python packages/vescale-dtensor/opinfo                      # all of it, and stock DTensor
    python packages/vescale-dtensor/opinfo --only cumsum sort   # entries with these in their names
    python packages/vescale-dtensor/opinfo --share 20 --seed 7  # a twentieth, drawn by the seed
    nox -s integration -- --opinfo-all                          # all of it, as a test

An entry is called with a few of its samples, in all its forms (function, aliases, method, operator,
in place, `out=`), its tensors on four simulated ranks in layouts that a seed draws: sharded along
each dim of a line, mixed with partial sums, and on a square. Result, operands, gradients and the
state of the generator have to be those of one device: bitwise where random numbers are drawn, else
up to the order of sums. Entries run in processes of their own with a bound in time: one that hangs
or crashes is named. `--json` has every failure in words; `--markdown OPS.md` and `--support
src/vescale_dtensor/op_support.json` write the tables of the docs and of `op_support`.
Ends with status 1 if an entry did not pass with vescale-dtensor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from _entries import entries
from _report import functions, markdown, summary
from _sweep import Bounds, Task, sweep

LIBRARIES = ["vescale", "stock"]
GOOD = frozenset({"passed", "plain", "excluded", "not on CPU"})


def main() -> int:
    """Run the command line."""
    options = _options()
    names = _chosen(options)
    known = _known(options, names)
    tasks: list[Task] = [(library, name) for library in options.libraries for name in names]
    bounds = Bounds(options.workers, options.seconds, options.samples, options.seed)
    print(f"{len(names)} entries, seed {options.seed}", file=sys.stderr)
    report = {
        "torch": torch.__version__,
        "seed": options.seed,
        "samples": options.samples,
        "entries": {name: {} for name in names} | known,
    }
    sweep(tasks, bounds, _Progress(len(tasks), report, options.json))
    print(summary(report))
    if options.support:
        options.support.write_text(json.dumps(functions(report), indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(report))
    found = [verdict["vescale"] for verdict in report["entries"].values() if "vescale" in verdict]
    return int(any(verdict["status"] not in GOOD for verdict in found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="opinfo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="names, or parts of names")
    parser.add_argument("--share", type=int, default=1, help="one entry out of so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4, help="of each entry, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120, help="bound for one entry")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument(
        "--stock-from", type=Path, help="an earlier JSON file: what it says of stock"
    )
    parser.add_argument("--json", type=Path, help="the JSON file to write")
    parser.add_argument("--markdown", type=Path, help="the Markdown file to write")
    parser.add_argument("--support", type=Path, help="the table of `op_support` to write")
    return parser.parse_args()


def _known(options: argparse.Namespace, names: list[str]) -> dict[str, dict[str, Any]]:
    """What an earlier report says of stock DTensor, which does not change with this package."""
    if options.stock_from is None:
        return {}
    report = json.loads(options.stock_from.read_text())
    asked = (torch.__version__, options.seed, options.samples)
    told = (report["torch"], report["seed"], report["samples"])
    if asked != told:
        raise SystemExit(f"{options.stock_from} is of torch, seed, samples {told}, not {asked}")
    found = {name: report["entries"].get(name, {}) for name in names}
    return {name: {"stock": entry["stock"]} for name, entry in found.items() if "stock" in entry}


def _chosen(options: argparse.Namespace) -> list[str]:
    """The entries to run: an exact name is that one only."""
    known = list(entries())
    wanted = [
        name
        for name in known
        if not options.only
        or any(word == name or (word not in known and word in name) for word in options.only)
    ]
    return [n for n in wanted if zlib.crc32(f"{options.seed} {n}".encode()) % options.share == 0]


class _Progress:
    """Fills the report, and tells: a line for what went wrong, one written over for all others."""

    def __init__(self, total: int, report: dict[str, Any], file: Path | None) -> None:
        self._total, self._done, self._began = total, 0, time.monotonic()
        self._report, self._file = report, file

    def __call__(self, task: Task, verdict: dict[str, Any]) -> None:
        self._done += 1
        library, name = task
        self._report["entries"][name][library] = verdict
        if library == "vescale" and verdict["status"] not in GOOD:
            failure = verdict["failures"][0]
            words = f"{failure['trial']}: {failure['error']}"
            print(f"\r{name}: {verdict['status']}: {words}", file=sys.stderr)
        if self._done % 25 == 0 or self._done == self._total:
            self._write()
        end = "\r" if sys.stderr.isatty() else "\n"
        if end == "\r" or self._done % 25 == 0 or self._done == self._total:
            spent = time.monotonic() - self._began
            line = f"{self._done}/{self._total}, {spent:.0f} s, {library} {name}"
            print(f"{line:<70}", end=end, file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Write the report so far, so that a sweep that is stopped was not for nothing."""
        self._report["seconds"] = round(time.monotonic() - self._began)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
