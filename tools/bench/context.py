"""A training step of a Llama-style model whose sequences are sharded: ours against code by hand.

Attention exchanges rows for heads, gathers keys and values, or has them come in a ring; by hand
the first two are written with `torch.distributed`, and a ring is held to keys gathered. The whole
model on whole sequences, as one device runs it, shows what a rank saves. torch's own
`context_parallel` has no kernel for CPUs (in 2.13), so it is no peer here. All variants live in
the same gloo processes of one thread each and take turns; before anything is timed the losses of
the first steps must be those of one plain device within 1e-5. Figures: tokens per second, live
bytes at the peak of a step on the rank with the most, collectives, bytes sent by rank 0.

"balance" is one causal layer in a ring: processor time of the busiest rank, by how many stripes
each rank has of the sequence, beside a zigzag.

    nox -s bench -- context                     # 4 ranks, all ways, and balance
    nox -s bench -- context --ways gather --length 1024
    nox -s bench -- context --ways balance
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from vescale_comm.testing import run

from tools.bench import Ratio, _ring_balance
from tools.bench._train.cases import EAGER, HAND, STEP, WHOLE
from tools.bench._train.details import Details
from tools.bench._train.model import Sizes
from tools.bench._train.ranks import Job, RankResult, compare

HEADS = {"exchange": 8, "gather": 6, "ring": 6}
"""Heads by way: four ranks divide the ones and not the others."""

BALANCE = "balance"
WAYS = (*HEADS, BALANCE)

_details = Details()


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- context",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    add("--hidden", nargs="+", type=int, default=[96, 384], help="default: 96 384")
    add("--length", type=int, default=512, help="tokens of a sequence (default: 512)")
    add("--batch", type=int, default=1, help="sequences of a batch (default: 1)")
    add("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    add("--rounds", type=int, default=5, help="turns of each variant (default: 5)")
    add("--turn", type=int, default=3, help="steps of a turn (default: 3)")
    add("--profile", nargs="?", type=int, const=5, default=0, metavar="STEPS", help="of rank 0")
    return made


def measure(
    ways: Sequence[str] = WAYS,
    hidden: Sequence[int] = (96, 384),
    rounds: int = 5,
    turn: int = 3,
    profile: int = 0,
    **sizes: int,
) -> Iterator[Ratio]:
    """Ours against code by hand and one device, way by way; stripes against zigzag."""
    _details.clear()
    if BALANCE in ways:
        yield from _ring_balance.measure(_ring_balance.Job(rounds=rounds))
    for way in (one for one in ways if one != BALANCE):
        for width in hidden:
            given = {"length": 512, "batch": 1, **sizes}
            job = Job(
                layout=f"cp4.{way}",
                sizes=Sizes(hidden=width, heads=HEADS[way], **given),
                rounds=rounds,
                turn=turn,
                profile=profile,
            )
            found = run(compare, 4, job, timeout=600)
            yield from _rows(_details.note(job, found), job.sizes.tokens, found)


def _rows(case: str, tokens: int, found: Sequence[dict[str, RankResult]]) -> Iterator[Ratio]:
    first = found[0]
    for name in (EAGER, STEP):
        speed = tokens / first[name].median
        for against in (HAND, WHOLE):
            other = tokens / first[against].median
            title = f"{case} {name}"
            yield Ratio(title, speed, other, "tok/s", against, more_is_better=True)
    peaks = {n: max(one[n].peak.total for one in found) / 1e6 for n in first}
    for against in (HAND, WHOLE):
        yield Ratio(f"{case} {EAGER}", peaks[EAGER], peaks[against], "MB", against)
    ours, hands = (sum(first[name].collectives.values()) for name in (EAGER, HAND))
    yield Ratio(f"{case} {EAGER}", ours, hands, "coll.", HAND)
    yield Ratio(f"{case} {EAGER}", first[EAGER].sent / 1e6, first[HAND].sent / 1e6, "MB out", HAND)


def details() -> tuple[str, dict[str, Any]]:
    """What the last `measure` found beside ratios: as text for people, and as data."""
    return _details.told()
