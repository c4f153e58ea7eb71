"""The command that compares the ways to share a layer of experts."""

import argparse
from typing import Any, Final

from vescale_parallel._cli.comparison import ComparisonTable, add_command, add_ranks, show
from vescale_parallel._common.messages import human_bytes
from vescale_parallel._common.numbers import real, whole
from vescale_parallel._cost.experts import ExpertLayer, Share, chosen_share, expert_shares

_HELP: Final = """\
Compare the ways to share a layer of experts over ranks (expert parallel), on paper.

  python -m vescale_parallel experts --experts 256 --top-k 8 --hidden 7168 --width 2048 --ranks 64

Figures are those of one layer in one training step of a rank with --tokens tokens: what it sends,
in how many collectives, the seconds of the cluster's links with none of it hidden, the bytes of
experts that it stores, and those that are alive while the layer runs, tokens that came included. *
marks what sends least. Plan(experts="ep") moves tokens; "padded" is a dense dispatch to the length
of the busiest expert; "gathered" are zero=3 over the same ranks; "everywhere" is data parallel.
"""

_HEADER: Final = ["ranks", "way", "sends", "collectives", "ms", "stores", "alive", ""]


def add_experts_command(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    about = "compare the ways to share a layer of experts"
    parser = add_command(commands, "experts", about, _HELP)
    add = parser.add_argument
    add("--experts", type=whole(), required=True, metavar="N", help="how many there are")
    add("--top-k", type=whole(), required=True, metavar="N", help="how many a token chooses")
    add("--hidden", type=whole(), required=True, metavar="N", help="features of a token")
    add("--width", type=whole(), required=True, metavar="N", help="features inside of an expert")
    add("--tokens", type=whole(), default=4096, metavar="N", help="of one rank (default: 4096)")
    add("--matrices", type=whole(), default=3, metavar="N", help="of an expert (default: 3)")
    add("--itemsize", type=whole(), default=2, metavar="N", help="bytes of an element (default: 2)")
    add(
        "--skew",
        type=real(1.0, 1e6),
        default=1.5,
        metavar="X",
        help="busiest expert / mean (default: 1.5)",
    )
    add_ranks(parser, "ep")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    layer = ExpertLayer(
        experts=options.experts,
        top_k=options.top_k,
        tokens=options.tokens,
        hidden=options.hidden,
        width=options.width,
        matrices=options.matrices,
        itemsize=options.itemsize,
        skew=options.skew,
    )
    shown = ComparisonTable(_HEADER, _row, chosen_share, "least")
    show(options, lambda ranks, link: expert_shares(layer, ranks, link), shown)
    return 0


def _row(ranks: int, share: Share, is_least: bool) -> list[object]:
    sent, stored, alive = (
        human_bytes(int(size)) for size in (share.sent, share.stored, share.alive)
    )
    time, said = f"{1e3 * share.seconds:.2f}", "*" if is_least else ""
    return [ranks, share.name, sent, share.collectives, time, stored, alive, said]
