"""Defines the arguments of the command line, and the texts of `--help`."""

import argparse
import math
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vescale_parallel._cli.context import add_context_command
from vescale_parallel._cli.experts import add_experts_command
from vescale_parallel._cli.files import write_file
from vescale_parallel._cli.memory import add_memory_command
from vescale_parallel._cli.models import PRESETS, chosen_plan, named_model, read_plan
from vescale_parallel._cli.plan_output import as_json, as_text
from vescale_parallel._cli.schedule import add_schedule_command
from vescale_parallel._cli.step_costs import Step, price_plan
from vescale_parallel._common.messages import bytes_in
from vescale_parallel._common.numbers import whole
from vescale_parallel._cost import CLUSTERS
from vescale_parallel._errors import MeshError, ParallelError, PlanError
from vescale_parallel._plan.picture import report_svg

_HELP: Final = """\
Check a plan for a model and a mesh, and say what a training step would cost.

Nothing is started and nothing is stored: the model is built without values, so that 405 billion
parameters on 16,384 ranks are checked on a laptop. The plan is written down, ready to be edited:

  python -m vescale_parallel plan config.json --mesh dp=64,tp=8 --memory 80GB
  python -m vescale_parallel plan my_models:build --mesh dp=8 --zero 3 --recompute
  python -m vescale_parallel plan config.json --mesh dp=64,tp=8 --write plan.toml
  python -m vescale_parallel plan config.json --mesh dp=64,tp=8 --plan plan.toml --json
  python -m vescale_parallel plan config.json --mesh dp=2,tp=4 --svg plan.svg

MODEL is a Hugging Face configuration (a file, or the folder that it is in) or module:callable, a
function without arguments that builds the model. Without --plan the layout is what the model
declares, or follows from the names and shapes of its layers; Plan.from_hf and Plan.for_decoder do
the same in a program. Memory and bytes follow from shapes; seconds are those of the cluster's
links and the efficiency that is assumed for it (vescale_parallel.cost.CLUSTERS).

Exit status: 0 where it fits, 1 where it does not, 2 where the plan or the question is wrong.
"""

MOST_RANKS: Final = 1 << 20
"""Of a mesh: shards of all of them are compared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    # Our own errors say what to do in a line.
    except ParallelError as error:
        print(error, file=sys.stderr)
        return 2
    # Of any other, of a model that cannot be built or ours, the traceback is what is needed; and
    # not the status by which Python would end, which says that a plan does not fit.
    except Exception:
        traceback.print_exc()
        return 2


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m vescale_parallel",
        description="Plans for models, meshes and graphs. See also: "
        "python -m vescale_parallel.cost, python -m vescale_parallel.train.",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="check a plan for a model and a mesh, and price it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(plan)
    plan.set_defaults(run=_plan)
    add_memory_command(commands)
    add_schedule_command(commands)
    add_context_command(commands)
    add_experts_command(commands)
    return made


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="config.json, its folder, or module:callable")
    add("--mesh", required=True, help="sizes by axis, outermost first, as dp=64,tp=8")
    add("--plan", type=Path, metavar="FILE", help="a plan as TOML or JSON (default: a preset)")
    add("--preset", choices=PRESETS, default="auto", help="default: auto")
    add("--sequence-parallel", action="store_true", help="shard what is between layers, too")
    add("--zero", type=int, choices=range(4), help="ZeRO level (default: what the plan says)")
    add("--memory", help="of a device, as 80GB or 40GiB (default: that of the cluster)")
    add("--cluster", choices=CLUSTERS, default="h100", help="default: h100")
    add("--sequences", type=whole(), default=1, help="of each dp rank and step (default: 1)")
    add("--sequence", type=whole(), default=4096, help="tokens of a sequence (default: 4096)")
    add("--checkpoint", help="full, selective, a number n (every n-th block) or bytes, as 24GB")
    add("--recompute", action="store_true", help="the model computes its blocks again by itself")
    add("--write", type=Path, metavar="FILE", help="write the plan, as TOML or .json")
    add("--svg", type=Path, metavar="FILE", help="draw which coordinates hold which shards")
    add("--json", action="store_true", help="print JSON in place of tables")


def _plan(options: argparse.Namespace) -> int:
    sizes = parse_mesh(options.mesh)
    memory = None if options.memory is None else parse_bytes(options.memory)
    model = named_model(options.model)
    if options.plan is None:
        plan = chosen_plan(model, sizes, options.preset, options.sequence_parallel)
    else:
        plan = read_plan(options.plan)
    if options.zero is not None:
        plan = plan.with_(zero=options.zero)
    if options.checkpoint is not None:
        word = options.checkpoint
        # A shell knows text only, and as text a number would be read as bytes.
        plan = plan.with_(checkpoint=int(word) if re.fullmatch("[0-9]{1,12}", word) else word)
    step = Step(options.sequences, options.sequence, options.recompute)
    found = price_plan(model, plan, sizes, step, cluster=options.cluster, memory=memory)
    if options.write is not None:
        # Also where it does not fit: it is written to be edited.
        as_it_ends = plan.to_json() if options.write.suffix == ".json" else plan.to_toml()
        write_file(options.write, as_it_ends)
    if options.svg is not None:
        write_file(options.svg, report_svg(found.report))
    print(as_json(found) if options.json else as_text(found))
    return 0 if found.fits else 1


def parse_mesh(text: str) -> dict[str, int]:
    """Return sizes by axis from `dp=64,tp=8`.

    Raises:
        MeshError: the text is no such list.
    """
    sizes = {}
    for part in text.split(","):
        # No -1 here: no processes run, by whose number it could be filled in.
        found = re.fullmatch(r"\s*([^\W\d]\w*)\s*=\s*([1-9]\d{0,11})\s*", part)
        if found is None or found[1] in sizes:
            raise MeshError(f"--mesh {text!r}: write sizes by axis, each once, as dp=64,tp=8.")
        sizes[found[1]] = int(found[2])
    if math.prod(sizes.values()) > MOST_RANKS:
        raise MeshError(f"--mesh {text!r}: up to {MOST_RANKS:,} ranks are looked at.")
    return sizes


def parse_bytes(text: str) -> float:
    """Return bytes from `80GB` (powers of ten) or `80GiB` (powers of two).

    Raises:
        PlanError: the text is no number of bytes.
    """
    found = bytes_in(text)
    if found is None or not 0 < found < 1e18:
        raise PlanError(f"--memory {text!r}: write bytes, as 80GB or 40GiB.")
    return found
