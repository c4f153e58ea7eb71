"""The command that compares the ways to share a layer of experts."""

import argparse
import json
from dataclasses import asdict
from typing import Any, Final

from vescale_parallel._common.messages import human_bytes, table
from vescale_parallel._cost.experts import ExpertLayer, Share, chosen_share, expert_shares
from vescale_parallel._cost.links import CLUSTERS

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
    parser = commands.add_parser(
        "experts",
        help="compare the ways to share a layer of experts",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--experts", type=int, required=True, metavar="N", help="how many there are")
    add("--top-k", type=int, required=True, metavar="N", help="how many a token chooses")
    add("--hidden", type=int, required=True, metavar="N", help="features of a token")
    add("--width", type=int, required=True, metavar="N", help="features inside of an expert")
    add("--tokens", type=int, default=4096, metavar="N", help="of one rank (default: 4096)")
    add("--matrices", type=int, default=3, metavar="N", help="of an expert (default: 3)")
    add("--itemsize", type=int, default=2, metavar="N", help="bytes of an element (default: 2)")
    add("--skew", type=float, default=1.5, metavar="X", help="busiest expert / mean (default: 1.5)")
    add("--ranks", type=int, nargs="+", required=True, metavar="N", help="of the axis ep")
    add("--stride", type=int, default=1, metavar="N", help="how far apart they are (default: 1)")
    add("--cluster", choices=CLUSTERS, default="h100", help="default: h100")
    add("--json", action="store_true", help="print JSON in place of the table")
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
    cluster = CLUSTERS[options.cluster]
    found = {
        ranks: expert_shares(layer, ranks, cluster.link(options.stride, ranks))
        for ranks in options.ranks
    }
    print(_as_json(found) if options.json else _as_table(found))
    return 0


def _as_json(found: dict[int, list[Share]]) -> str:
    said = {
        ranks: {"least": chosen_share(shares).name, "ways": [asdict(one) for one in shares]}
        for ranks, shares in found.items()
    }
    return json.dumps(said, indent=2)


def _as_table(found: dict[int, list[Share]]) -> str:
    rows = [
        _row(ranks, share, "*" if share is chosen_share(shares) else "")
        for ranks, shares in found.items()
        for share in shares
    ]
    return table(_HEADER, rows, right=_HEADER[2:7])


def _row(ranks: int, share: Share, said: str) -> list[object]:
    sent, stored, alive = (
        human_bytes(int(size)) for size in (share.sent, share.stored, share.alive)
    )
    time = f"{1e3 * share.seconds:.2f}"
    return [ranks, share.name, sent, share.collectives, time, stored, alive, said]
