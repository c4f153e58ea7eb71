"""`python -m vescale_parallel memory`: the memory of a graph, planned and drawn."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torch import export, fx
from torch.fx.experimental.proxy_tensor import make_fx

import vescale_parallel.memory as memory
from vescale_parallel._common.numbers import real
from vescale_parallel._errors import MemoryPlanError

_HELP: Final = """\
Plan the memory of a torch.fx graph: the order of its nodes, and where their results lie.

  python -m vescale_parallel memory my_models:step
  python -m vescale_parallel memory my_models:step --seconds 60 --svg plan.svg --json

GRAPH is module:callable. The callable takes no arguments and returns a graph (of make_fx or
torch.export), or a function and its inputs, (function, (x, y)), which is then traced without
values, or a graph and its inputs. vescale_parallel.memory.plan does the same in a program, and
executes it, too.

Exit status: 0, or 2 where the graph cannot be planned.
"""


def add_memory_command(commands: Any) -> None:
    """Add `memory` to the commands of a parser."""
    parser = commands.add_parser(
        "memory",
        help="plan the memory of a torch.fx graph, and draw it",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("graph", metavar="GRAPH", help="module:callable")
    add("--solver", choices=memory.SOLVERS, default="auto", help="default: auto")
    add(
        "--seconds",
        type=real(0.0, 86_400.0),
        default=10,
        help="for all searches together (default: 10)",
    )
    add("--svg", type=Path, metavar="FILE", help="draw the plan: time x address")
    add("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Answer; returns the exit status."""
    graph, inputs = named_graph(options.graph)
    plan = memory.plan(graph, inputs=inputs, solver=options.solver, seconds=options.seconds)
    print(plan.to_json() if options.json else plan)
    if options.svg is not None:
        try:
            options.svg.write_text(plan.svg(), encoding="utf-8")
        except OSError as error:
            raise MemoryPlanError(f"--svg {options.svg}: {error.strerror}") from error
    return 0


def named_graph(name: str) -> tuple[Any, Any]:
    """Return the graph of `module:callable` and example inputs, None where it needs none.

    Raises:
        MemoryPlanError: the name is none, or what it names makes no graph.
    """
    module, _, function = name.partition(":")
    # As `python -m` has it: modules in the current folder can be named.
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    # A name that begins with a dot is relative, to nothing: TypeError.
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise MemoryPlanError(f"GRAPH '{name}' cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    # Both kinds of graphs have a `__call__`.
    given = isinstance(make, fx.GraphModule | export.ExportedProgram)
    made = make() if callable(make) and not given else make
    graph, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(graph, fx.GraphModule | export.ExportedProgram):
        return graph, inputs
    if callable(graph) and isinstance(inputs, tuple | list):
        return _traced(name, graph, inputs), None
    raise MemoryPlanError(
        f"GRAPH '{name}' returned a {type(made).__name__}: it is to return a torch.fx graph, or a "
        "function and a tuple of its inputs."
    )


def _traced(name: str, function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    try:
        return make_fx(function, tracing_mode="fake")(*inputs)
    except Exception as error:  # whatever the function raises on tensors without values
        line = " ".join(str(error).split())[:300]
        raise MemoryPlanError(
            f"the function of GRAPH '{name}' cannot be traced without values: "
            f"{type(error).__name__}: {line}"
        ) from error
