"""The command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.first_gpu.catalogue import SECTIONS, Section, chosen

DESCRIPTION = """\
Ask a GPU (or, for want of one, the CPU) everything that veScale wants to know of it: whether random
numbers, training over simulated ranks, graphs, streams, kernels, memory and NCCL do there what they
promise, and what they cost. It needs torch 2.11 or later and numpy, no network, and no
installation. Nothing is sent anywhere: what it finds is written to the folder of --out.

Each section runs in a process of its own, so a crash or a hang takes nothing else along, and each
finding is written at once. The exit status is 1 if something is not as expected.
"""

EXAMPLES = """\
examples:
  python -m tools.first_gpu
      all of it, five minutes, on the GPU if there is one

  python -m tools.first_gpu --only rng,mesh --minutes 2
      two sections

  python -m tools.first_gpu --only mesh --case "train dp=2*"
      some cases of a section, as the last column of the report says; their errors are shown in full

  python -m tools.first_gpu --device cpu --minutes 1
      as a test of this script: of each section what comes first

  python -m tools.first_gpu --with repair.py --only streams
      a file that each section's process runs first: a repair on trial, or a fault to be found
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
        device: "cuda" or "cpu".
        minutes: for all sections together.
        sections: those to run, in their order.
        case: a glob of names of cases.
        out: folder for what is written.
        at_once: how many sections run beside each other.
        case_limit: seconds after which a case counts as hanging.
        first: files that each section's process runs first.
    """

    device: str
    minutes: float
    sections: tuple[Section, ...]
    case: str
    out: Path
    at_once: int
    case_limit: float
    first: tuple[Path, ...]

    @property
    def cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"


def parser() -> argparse.ArgumentParser:
    """The options."""
    sections = "\n".join(f"  {one.name:8} {one.title}" for one in SECTIONS)
    made = argparse.ArgumentParser(
        prog="python -m tools.first_gpu",
        description=DESCRIPTION,
        epilog=f"sections:\n{sections}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                      help="auto: CUDA where it is available (%(default)s)")  # fmt: skip
    made.add_argument("--minutes", type=float, default=5.0,
                      help="for all sections together (%(default)s)")  # fmt: skip
    made.add_argument("--only", metavar="SECTION,...", help="these sections (all)")
    made.add_argument("--case", default="*", metavar="GLOB", help="these cases (all)")
    made.add_argument("--out", type=Path, default=Path("runs/first_gpu"), metavar="FOLDER",
                      help="for report.md, report.json, findings.jsonl and log.txt; those of an "
                      "earlier run are replaced (%(default)s)")  # fmt: skip
    made.add_argument("--at-once", type=int, metavar="N",
                      help="sections that run beside each other (by the number of cores: up to 4 "
                      "on a GPU, 2 on the CPU)")  # fmt: skip
    made.add_argument("--case-limit", type=float, default=45.0, metavar="SECONDS",
                      help="a case that takes longer is taken to hang (%(default)s)")  # fmt: skip
    made.add_argument("--with", type=Path, action="append", default=[], dest="first",
                      metavar="FILE",
                      help="Python that each section's process runs first")  # fmt: skip
    return made


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the program with a message where it cannot be read."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        sections = chosen(None if given.only is None else given.only.split(","))
    except ValueError as error:
        made.error(str(error))
    if given.minutes <= 0 or given.case_limit <= 0:
        made.error("--minutes and --case-limit are numbers above 0")
    for file in given.first:
        if not file.is_file():
            made.error(f"--with: there is no file {file}")
    device = given.device if given.device != "auto" else _available()
    if device == "cuda" and given.device == "cuda" and _available() != "cuda":
        made.error("--device cuda: torch finds no CUDA device here; --device cpu runs the rest")
    cores = os.cpu_count() or 1
    at_once = max(1, min(cores // 2, 4) if device == "cuda" else min(cores, 2))
    return Options(
        device=device,
        minutes=given.minutes,
        sections=sections,
        case=given.case,
        out=given.out,
        at_once=given.at_once or at_once,
        case_limit=given.case_limit,
        first=tuple(file.resolve() for file in given.first),
    )


def _available() -> str:
    # Here: --help does not wait for torch.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
