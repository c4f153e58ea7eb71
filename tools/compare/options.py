"""The command line of the comparison."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vescale_parallel import TrainError
from vescale_parallel.train.options import flag, make_options, parse_arguments, parse_mesh

DESCRIPTION = """\
Train one model on one device and over meshes of processes, and compare.

First on one process with plain PyTorch, then on 4 processes (2-way data parallel, 2-way tensor and
sequence parallel), then with ZeRO-3 on such a mesh. Their losses are printed side by side, with
three facts computed from the runs: whether the initial parameters and the dropout masks are bitwise
equal, and the largest difference of losses; and what each rank holds between steps. Then the
checkpoint of the mesh is resumed on other meshes, which continue the same
curve. The exit status is 1 when a promise is broken.
"""

EXAMPLES = """\
examples:
  python -m tools.compare
      the whole job, in about three minutes on two cores

  python -m tools.compare --steps 30 --more-steps 10 --resume-on tp=4
      a shorter one

  python -m tools.compare --data ~/books --layers 2 --lr 1e-3
      every option of the trainer may follow: see python -m vescale_parallel.train --help

Everything is written to --out: curves.png, log.jsonl (all runs), results.json, and a folder for
each run with its own log, output and checkpoint.
"""

ONE = "one"
"""The name of the mesh that is a single process."""

_OURS = (
    "mesh",
    "out",
    "overwrite",
    "resume",
    "steps",
    "save_every",
    "digests",
    "traceback",
    "zero",
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What the comparison was asked to do.

    Attributes:
        steps: steps on one device and on the mesh, before the checkpoint.
        more_steps: steps after resuming it.
        mesh: the mesh to compare with one device, as the trainer reads it.
        resume_on: the meshes to resume on; `one` is a single process.
        zero_on: the meshes to train on with ZeRO-3 besides.
        out: folder for everything that is written.
        time_limit: seconds that each run may take.
        training: options for the trainer, as on its command line.
    """

    steps: int
    more_steps: int
    mesh: str
    resume_on: tuple[str, ...]
    zero_on: tuple[str, ...]
    out: Path
    time_limit: float
    training: tuple[str, ...]


def parser() -> argparse.ArgumentParser:
    """The options that are the comparison's own."""
    made = argparse.ArgumentParser(
        prog="python -m tools.compare",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--steps", type=int, default=60, help="steps before the checkpoint (%(default)s)"
    )
    made.add_argument("--more-steps", type=int, default=20, help="steps after it (%(default)s)")
    made.add_argument("--mesh", default="dp=2,tp=2", help="the mesh to compare (%(default)s)")
    made.add_argument(
        "--resume-on",
        nargs="*",
        default=["tp=4", "dp=3", "one"],
        metavar="MESH",
        help="meshes to resume on, 'one' for one process (tp=4 dp=3 one)",
    )
    made.add_argument(
        "--zero-on",
        nargs="*",
        default=["dp=2,tp=2"],
        metavar="MESH",
        help="meshes to train on with ZeRO-3 as well (dp=2,tp=2)",
    )
    made.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder (%(default)s)")
    made.add_argument(
        "--time-limit", type=float, default=600.0, help="seconds for each run (%(default)s)"
    )
    return made


def parse(arguments: Sequence[str] | None) -> CompareOptions:
    """Read the command line; what is not ours must be an option of the trainer.

    Raises:
        TrainError: an option that neither knows, or one that the comparison sets itself.
    """
    ours, rest = parser().parse_known_args(arguments)
    given = parse_arguments(rest)
    # Wrong values are found here, before a run is started that would find them.
    make_options(given)
    for name in _OURS:
        if name in given:
            raise TrainError(f"{flag(name)} is set by the comparison itself; see --help.")
    if ours.steps < 1 or ours.more_steps < 0:
        raise TrainError("--steps is at least 1, and --more-steps at least 0.")
    if not 0 < ours.time_limit < math.inf:
        raise TrainError(f"--time-limit {ours.time_limit}: a number of seconds above 0 is needed.")
    for mesh in {ours.mesh, *ours.resume_on, *ours.zero_on} - {ONE}:
        if -1 in parse_mesh(mesh).values():
            raise TrainError(f"{mesh!r}: here every size is needed, to start the processes.")
    return CompareOptions(
        steps=ours.steps,
        more_steps=ours.more_steps,
        mesh=ours.mesh,
        resume_on=tuple(ours.resume_on) if ours.more_steps else (),
        zero_on=tuple(ours.zero_on),
        out=ours.out,
        time_limit=ours.time_limit,
        training=tuple(rest),
    )
