"""Prints comparisons of ways to share a layer over ranks, for several commands."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from vescale_parallel._common.messages import table
from vescale_parallel._common.numbers import whole
from vescale_parallel._cost.links import CLUSTERS, Link

W = TypeVar("W")


@dataclass(frozen=True)
class ComparisonTable(Generic[W]):
    """How the ways of one command are printed.

    Attributes:
        header: of the table; all columns but the first two and the last hold numbers.
        row: of one way, by the number of ranks; with whether it is the best.
        best: of the ways of one number of ranks.
        word: for the best one, in JSON.
    """

    header: Sequence[str]
    row: Callable[[int, W, bool], list[object]]
    best: Callable[[list[W]], W]
    word: str


def add_command(commands: Any, name: str, about: str, text: str) -> argparse.ArgumentParser:
    """Add a command to the parsers of all commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_ranks(parser: argparse.ArgumentParser, axis: str) -> None:
    """Add the options about ranks and their links, and how results are printed."""
    add = parser.add_argument
    add("--ranks", type=whole(), nargs="+", required=True, metavar="N", help=f"of the axis {axis}")
    add(
        "--stride", type=whole(), default=1, metavar="N", help="how far apart they are (default: 1)"
    )
    add("--cluster", choices=CLUSTERS, default="h100", help="default: h100")
    add("--json", action="store_true", help="print JSON in place of the table")


def show(
    options: argparse.Namespace, ways: Callable[[int, Link], list[W]], shown: ComparisonTable[W]
) -> None:
    """Print the ways of each number of ranks.

    Args:
        options: with those of `add_ranks`.
        ways: of so many ranks over such links.
        shown: how they are printed.
    """
    cluster = CLUSTERS[options.cluster]
    found = {n: ways(n, cluster.link(options.stride, n)) for n in options.ranks}
    print(_as_json(found, shown) if options.json else _as_table(found, shown))


def _as_json(found: Mapping[int, list[Any]], shown: ComparisonTable[Any]) -> str:
    said = {
        ranks: {shown.word: shown.best(ways).name, "ways": [asdict(way) for way in ways]}
        for ranks, ways in found.items()
    }
    return json.dumps(said, indent=2)


def _as_table(found: Mapping[int, list[W]], shown: ComparisonTable[W]) -> str:
    rows = [
        # By identity, as two ways may cost the same.
        shown.row(ranks, way, way is shown.best(ways))
        for ranks, ways in found.items()
        for way in ways
    ]
    return table(shown.header, rows, right=shown.header[2:-1])
