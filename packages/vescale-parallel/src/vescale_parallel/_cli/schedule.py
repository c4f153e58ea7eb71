"""The command that compares pipeline schedules."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vescale_parallel._cli.files import write_file
from vescale_parallel._common.numbers import real, whole
from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.choice import SCHEDULES, compare_schedules
from vescale_parallel._schedules.pictures import TEXT_LEGEND, as_svg, as_text
from vescale_parallel._schedules.tables import as_json, as_table, as_trace
from vescale_parallel._schedules.timeline import StageTimes, Timeline

_HELP: Final = """\
Compare and draw pipeline schedules for a number of ranks and microbatches, on paper.

  python -m vescale_parallel schedule --stages 8 --microbatches 32
  python -m vescale_parallel schedule --stages 8 --microbatches 32 --times 1,1.2,0.8 --send 0.05
  python -m vescale_parallel schedule --stages 8 --microbatches 32 --svg schedules.svg
  python -m vescale_parallel schedule --stages 8 --microbatches 32 --only zbv --svg zbv.svg
  python -m vescale_parallel schedule --stages 4 --microbatches 8 --only 1f1b --csv 1f1b.csv

Times are those of one rank's part of the model for one microbatch: of a forward, of the gradients
of inputs, of those of weights. Memory is counted in such parts as well: 1 is what one microbatch
keeps from its forward to its backward. The bubble is the part of all ranks' time in which they
wait. Below the table schedules of up to 16 ranks are drawn in letters; on a terminal that is too
narrow for a letter an action, a letter stands for more. SVG opens in a browser, traces in Perfetto;
CSV is what torch's pipelining reads.
"""

# Microbatches, chunks, and both multiplied with stages.
_MOST: Final = 65_536

# Stages: what is written for a V of ranks takes ever longer with them, for one microbatch too.
_MOST_STAGES: Final = 512

# Ranks of which pictures are printed.
_MOST_ROWS: Final = 16


def add_schedule_command(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "schedule",
        help="compare pipeline schedules: time, bubble, memory",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--stages",
        type=whole(most=_MOST_STAGES),
        required=True,
        metavar="N",
        help="number of pipeline ranks",
    )
    add("--microbatches", type=whole(most=_MOST), required=True, metavar="N", help="of one step")
    add(
        "--chunks",
        type=whole(most=_MOST),
        default=2,
        metavar="N",
        help="parts a rank, interleaved (default: 2)",
    )
    add("--times", default="1,1,1", metavar="F,I,W", help="of one rank's part (default: 1,1,1)")
    add("--send", type=real(), default=0.0, metavar="T", help="time of a message (default: 0)")
    add("--only", choices=SCHEDULES, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    add("--svg", type=Path, metavar="FILE", help="draw them to one scale, or the one of --only")
    add("--trace", type=Path, metavar="FILE", help="write it for Perfetto; needs --only")
    add("--csv", type=Path, metavar="FILE", help="write its actions; needs --only")
    add("--json", action="store_true", help="print JSON in place of the table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.only is None and (options.trace or options.csv):
        raise PlanError("--trace and --csv are of one schedule: name it by --only.")
    times, ranks, microbatches = _times(options.times), options.stages, options.microbatches
    if ranks * microbatches * options.chunks > _MOST:
        raise PlanError(
            f"--stages {ranks} x --microbatches {microbatches} x --chunks {options.chunks}: up to "
            f"{_MOST:,} forwards are compared. Fewer microbatches have a bubble like that of many."
        )
    found = compare_schedules(
        ranks, microbatches, chunks=options.chunks, times=times, send=options.send
    )
    if options.only is not None:
        # All are made, and one is shown: a name whose schedule there is not has its reason among
        # them.
        found = {options.only: found[options.only]}
    there = [one for one in found.values() if isinstance(one, Timeline)]
    if options.only is not None and not there:
        raise PlanError(str(found[options.only]))
    _write(there, options)
    print(as_json(found) if options.json else _printed(found, there))
    return 0


def _printed(found: Mapping[str, Timeline | str], there: Sequence[Timeline]) -> str:
    """The table, and below it pictures for a terminal, where these are no longer than it."""
    # Files and pipes have no width: as much as a picture in letters is readable at.
    size = shutil.get_terminal_size((240, 24))
    parts = [as_table(found)]
    if len(there[0].ends if there else ()) <= _MOST_ROWS:
        parts += [as_text(one, size.columns) for one in there]
        parts.append(TEXT_LEGEND)
    return "\n\n".join(parts)


def _write(there: Sequence[Timeline], options: argparse.Namespace) -> None:
    if options.svg is not None:
        write_file(options.svg, as_svg(there))
    if options.trace is not None:
        write_file(options.trace, as_trace(there[0]))
    if options.csv is not None:
        write_file(options.csv, there[0].schedule.to_csv())


def _times(text: str) -> StageTimes:
    try:
        forward, inputs, weights = map(real(), text.split(","))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise PlanError(f"--times {text!r}: {error}; write three numbers, as 1,1.2,0.8.") from error
    return StageTimes(forward, inputs, weights)
