"""The command that compares the ways to share attention of a sharded sequence."""

import argparse
import json
from dataclasses import asdict
from typing import Any, Final

from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._cost.context import Attention, Way, attention_ways, chosen
from vescale_parallel._cost.links import CLUSTERS

_HELP: Final = """\
Compare the ways to share attention of a sharded sequence (context parallel), on paper.

  python -m vescale_parallel context --tokens 131072 --heads 64 --kv-heads 8 --ranks 64
  python -m vescale_parallel context --tokens 131072 --heads 32 --ranks 8 16 --stride 8

Figures are those of one layer in one training step: what a rank sends, in how many collectives, the
seconds of the cluster's links with none of it hidden, and what a rank keeps for its backward beside
its shards (whole keys and values, a causal mask of its rows). Plan(batch="cp:1") takes the way
marked with *: that which sends least, a byte of a mask counted as sent, and a ring only where ranks
do not divide heads; Plan(batch="cp:1", sequence=...) that which it names.
"""

_HEADER: Final = ["ranks", "way", "sends", "collectives", "ms", "keeps", ""]


def add_context_command(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "context",
        help="compare the ways to share attention of a sharded sequence",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=int, required=True, metavar="N", help="of a sequence")
    add("--heads", type=int, required=True, metavar="N", help="of the query")
    add("--kv-heads", type=int, metavar="N", help="of keys and values (default: --heads)")
    add("--head-dim", type=int, default=128, metavar="N", help="default: 128")
    add("--batch", type=int, default=1, metavar="N", help="sequences (default: 1)")
    add("--itemsize", type=int, default=2, metavar="N", help="bytes of an element (default: 2)")
    add("--ranks", type=int, nargs="+", required=True, metavar="N", help="of the axis cp")
    add("--stride", type=int, default=1, metavar="N", help="how far apart they are (default: 1)")
    add("--cluster", choices=CLUSTERS, default="h100", help="default: h100")
    add("--json", action="store_true", help="print JSON in place of the table")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    attention = Attention(
        tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim,
        batch=options.batch,
        itemsize=options.itemsize,
    )
    cluster = CLUSTERS[options.cluster]
    found = {
        ranks: attention_ways(attention, ranks, cluster.link(options.stride, ranks))
        for ranks in options.ranks
    }
    print(_as_json(found) if options.json else _as_table(found))
    return 0


def _as_json(found: dict[int, list[Way]]) -> str:
    return json.dumps(
        {
            ranks: {"chosen": chosen(ways).name, "ways": [asdict(way) for way in ways]}
            for ranks, ways in found.items()
        },
        indent=2,
    )


def _as_table(found: dict[int, list[Way]]) -> str:
    rows = [
        _row(ranks, way, is_chosen=way is chosen(ways))
        for ranks, ways in found.items()
        for way in ways
    ]
    return table(_HEADER, rows, right=_HEADER[2:6])


def _row(ranks: int, way: Way, *, is_chosen: bool) -> list[object]:
    said = "*" if is_chosen else way.lacks or ""
    if not way.collectives and way.lacks:
        return [ranks, way.name, "-", "-", "-", "-", said]
    sizes = (human_bytes(int(size)) for size in (way.sent, way.kept))
    sent, kept = sizes
    return [ranks, way.name, sent, way.collectives, f"{1e3 * way.seconds:.2f}", kept, said]
