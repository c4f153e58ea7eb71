"""The command that compares pipeline schedules."""

import argparse
from pathlib import Path
from typing import Any, Final

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.choice import SCHEDULES, compare_schedules
from vescale_parallel._schedules.shown import as_json, as_svg, as_table, as_trace
from vescale_parallel._schedules.timeline import StageTimes, Timeline

_HELP: Final = """\
Compare pipeline schedules for a number of ranks and microbatches, on paper.

  python -m vescale_parallel schedule --stages 8 --microbatches 32
  python -m vescale_parallel schedule --stages 8 --microbatches 32 --times 1,1.2,0.8 --send 0.05
  python -m vescale_parallel schedule --stages 8 --microbatches 32 --only zbv --svg zbv.svg
  python -m vescale_parallel schedule --stages 4 --microbatches 8 --only 1f1b --csv 1f1b.csv

Times are those of one rank's part of the model for one microbatch: of a forward, of the gradients
of inputs, of those of weights. Memory is counted in such parts as well: 1 is what one microbatch
keeps from its forward to its backward. The bubble is the part of all ranks' time in which they
wait. Pictures open in a browser, traces in Perfetto; CSV is what torch's pipelining reads.
"""


def add_schedule_command(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "schedule",
        help="compare pipeline schedules: time, bubble, memory",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--stages", type=int, required=True, metavar="N", help="number of pipeline ranks")
    add("--microbatches", type=int, required=True, metavar="N", help="of one step")
    add("--chunks", type=int, default=2, metavar="N", help="parts a rank, interleaved (default: 2)")
    add("--times", default="1,1,1", metavar="F,I,W", help="of one rank's part (default: 1,1,1)")
    add("--send", type=float, default=0.0, metavar="T", help="time of a message (default: 0)")
    add("--only", choices=SCHEDULES, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    add("--svg", type=Path, metavar="FILE", help="draw it; needs --only")
    add("--trace", type=Path, metavar="FILE", help="write it for Perfetto; needs --only")
    add("--csv", type=Path, metavar="FILE", help="write its actions; needs --only")
    add("--json", action="store_true", help="print JSON in place of the table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.only is None and (options.svg or options.trace or options.csv):
        raise PlanError("--svg, --trace and --csv are of one schedule: name it by --only.")
    times, ranks, microbatches = _times(options.times), options.stages, options.microbatches
    found = compare_schedules(
        ranks, microbatches, chunks=options.chunks, times=times, send=options.send
    )
    if options.only is not None:
        found = {options.only: found[options.only]}
        _write(found[options.only], options)
    print(as_json(found) if options.json else as_table(found))
    return 0


def _write(found: Timeline | str, options: argparse.Namespace) -> None:
    if isinstance(found, str):
        raise PlanError(found)
    for path, make in ((options.svg, as_svg), (options.trace, as_trace)):
        if path is not None:
            path.write_text(make(found), encoding="utf-8")
    if options.csv is not None:
        options.csv.write_text(found.schedule.to_csv(), encoding="utf-8")


def _times(text: str) -> StageTimes:
    try:
        forward, inputs, weights = map(float, text.split(","))
    except ValueError as error:
        raise PlanError(f"--times {text!r}: write three numbers, as 1,1.2,0.8.") from error
    if min(forward, inputs, weights) < 0:
        raise PlanError(f"--times {text!r}: no time is negative.")
    return StageTimes(forward, inputs, weights)
