"""The fault table: every fault made to happen, with every checkpoint system that is installed.

`nox -s crash`, or `python packages/vescale-ckpt/faults [--only WORD] [--out FILE] [--json FILE]`.
Prints the table, and writes it as Markdown and, with every single trial, as JSON. Ends with status
1 if anything was silent or lost, or hung, with vescale-ckpt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import _crashes
import _damage
import torch
from _systems import System, present
from _trials import HUNG, LOST, SILENT, Bench, Cell, Trial

FAULTS: dict[str, Callable[[Bench], Iterator[Trial]]] = {
    "code hidden in any file runs on load": _damage.code,
    "one flipped bit, anywhere": _damage.flipped,
    "any file truncated to 0, to half, by one byte": _damage.truncated,
    "any file removed": _damage.removed,
    "a hostile manifest whose digests fit": _damage.hostile,
    "kill -9 at each file operation of a first save": _crashes.first_save_killed,
    "kill -9 at each file operation of an overwrite": _crashes.overwrite_killed,
    "kill -9 right after each rename and removal": _crashes.replaced_record,
    "killed in the middle of a write": _crashes.killed_while_writing,
    "disk full, for one of two files or threads": _crashes.disk_full,
    "two writers on one step, every interleaving": _crashes.two_writers,
    "two first saves that replace nothing, every interleaving": _crashes.two_first_writers,
    "a rank dies before the barrier": _crashes.rank_dies,
    "ranks with values of their own under one name": _crashes.rank_local,
    "interleaved shards": _crashes.interleaved_shards,
}
MEANINGS = """\
- `intact`: nothing was lost, and nobody had to know.
- `caught`: an error said so, and what was saved before is still there.
- `hung`: a rank went on waiting, three times as long as its process group allows.
- `lost`: what had been saved can no longer be loaded.
- `silent`: wrong data was loaded, foreign code ran, or a failed save was reported as done.

The words in bold are the worst of the trials that the numbers count.
"""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    parser.add_argument("--json", type=Path, help="the JSON file to write, with every trial")
    options = parser.parse_args()
    torch.set_num_threads(1)
    systems, absent = present()
    _import_all()
    table: dict[str, dict[str, Cell]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for name, fault in FAULTS.items():
            if options.only in name:
                began = time.monotonic()
                table[name] = _row(name, fault, systems, folder)
                print(f"{name} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    print(_markdown(table, systems, absent))
    if options.out:
        options.out.write_text(_markdown(table, systems, absent) + "\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_trials(table, systems, absent), indent=1) + "\n")
    ours = [row[systems[-1].name] for row in table.values()]
    return int(any(cell.worst in (HUNG, LOST, SILENT) for cell in ours))


def _import_all() -> None:
    # Before anything is forked: importing torch's parts takes seconds.
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401


def _row(
    name: str, fault: Callable[[Bench], Iterator[Trial]], systems: list[System], folder: str
) -> dict[str, Cell]:
    found = {}
    for number, system in enumerate(systems):
        bench = Bench(system, f"{folder}/{abs(hash(name))}-{number}")
        Path(bench.folder).mkdir()
        trials = list(fault(bench))
        if trials:
            found[system.name] = Cell(trials)
    return found


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "not tried"
    return f"**{cell.worst}** ({', '.join(f'{word} {n}' for word, n in cell.counts.items())})"


def _markdown(table: dict[str, dict[str, Cell]], systems: list[System], absent: list[str]) -> str:
    names = [system.name for system in systems]
    lines = [
        "# What becomes of a checkpoint when things go wrong",
        "",
        "Printed by `nox -s crash`, which makes every one of these faults happen, in processes of "
        f"its own. {datetime.now(UTC):%Y-%m-%d}, Linux, local disk.",
        "",
        *MEANINGS.splitlines(),
        "",
        "| fault | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
        *(
            f"| {fault} | " + " | ".join(_text(row.get(name)) for name in names) + " |"
            for fault, row in table.items()
        ),
    ]
    if absent:
        lines += ["", f"Not installed, so not tried: {', '.join(absent)}."]
    lines += ["", "The worst of every cell, in its own words:", ""]
    for fault, row in table.items():
        for name in names:
            if name in row and row[name].worst in (HUNG, LOST, SILENT):
                trial = next(t for t in row[name].trials if t.verdict == row[name].worst)
                lines.append(f"- {fault}, {name}: {trial.where}: {_one_line(trial.because)}")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    # Not the traceback that some put into their message: it names places on one machine.
    return " ".join(text.partition("Traceback")[0].split())[:160]


def _trials(
    table: dict[str, dict[str, Cell]], systems: list[System], absent: list[str]
) -> dict[str, object]:
    found = {
        fault: {
            name: {
                "worst": cell.worst,
                "counts": cell.counts,
                "trials": [vars(trial) for trial in cell.trials],
            }
            for name, cell in row.items()
        }
        for fault, row in table.items()
    }
    return {"systems": [s.name for s in systems], "absent": absent, "faults": found}


if __name__ == "__main__":
    sys.exit(main())
