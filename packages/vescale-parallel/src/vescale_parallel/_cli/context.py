"""The command that compares the ways to share attention of a sharded sequence."""

import argparse
from typing import Any, Final

from vescale_parallel._cli.comparison import ComparisonTable, add_command, add_ranks, show
from vescale_parallel._common.messages import human_bytes
from vescale_parallel._common.numbers import whole
from vescale_parallel._cost.context import Attention, Way, attention_ways, chosen

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
    about = "compare the ways to share attention of a sharded sequence"
    parser = add_command(commands, "context", about, _HELP)
    add = parser.add_argument
    add("--tokens", type=whole(), required=True, metavar="N", help="of a sequence")
    add("--heads", type=whole(), required=True, metavar="N", help="of the query")
    add("--kv-heads", type=whole(), metavar="N", help="of keys and values (default: --heads)")
    add("--head-dim", type=whole(), default=128, metavar="N", help="default: 128")
    add("--batch", type=whole(), default=1, metavar="N", help="sequences (default: 1)")
    add("--itemsize", type=whole(), default=2, metavar="N", help="bytes of an element (default: 2)")
    add_ranks(parser, "cp")
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
    shown = ComparisonTable(_HEADER, _row, chosen, "chosen")
    show(options, lambda ranks, link: attention_ways(attention, ranks, link), shown)
    return 0


def _row(ranks: int, way: Way, is_chosen: bool) -> list[object]:
    said = "*" if is_chosen else way.lacks or ""
    # A way that cannot be has no figures; a ring that has only to be asked for does.
    if not way.collectives and way.lacks:
        return [ranks, way.name, "-", "-", "-", "-", said]
    sizes = (human_bytes(int(size)) for size in (way.sent, way.kept))
    sent, kept = sizes
    return [ranks, way.name, sent, way.collectives, f"{1e3 * way.seconds:.2f}", kept, said]
