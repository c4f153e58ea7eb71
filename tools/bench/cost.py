"""The cost model of a training step against steps that were measured, on 2 to 8 gloo ranks.

The model is given what it takes for granted, measured on the same ranks just before: latency and
bandwidth of an all-reduce, the speed of one matrix product and of an update. The step is the one by
hand of `train`. Each line is predicted / measured: 1 is right. Bytes are exact; a step's time is
right as far as it is products and collectives; memory is an upper bound.

    nox -s bench -- cost                            # some minutes on two idle cores
    nox -s bench -- cost --hidden 512 --ranks 2 4
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._train.model import Sizes
from tools.bench._train.predict import Measured, measure_step

MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"dp": 2}, {"dp": 1, "tp": 2}),
    4: ({"dp": 4}, {"dp": 2, "tp": 2}),
    8: ({"dp": 8}, {"dp": 4, "tp": 2}),
}


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--ranks", nargs="+", type=int, choices=MESHES, default=list(MESHES))
    made.add_argument("--hidden", nargs="+", type=int, default=[64, 512], help="default: 64 512")
    made.add_argument("--rounds", type=int, default=15, help="steps that are timed (default: 15)")
    return made


def measure(
    ranks: Sequence[int] = tuple(MESHES),
    hidden: Sequence[int] = (64, 512),
    rounds: int = 15,
    **sizes: int,
) -> Iterator[Ratio]:
    """Predicted against measured: seconds of a step, bytes that a rank sends, bytes it holds."""
    for count in ranks:
        for axes in MESHES[count]:
            for width in hidden:
                size = Sizes(hidden=width, **sizes)
                found = run(measure_step, count, axes, size, rounds, timeout=120 + 20 * rounds)
                case = ".".join(f"{axis}{n}" for axis, n in axes.items())
                yield from _rows(f"{case} {width}", found)


def _rows(case: str, found: Sequence[Measured]) -> Iterator[Ratio]:
    # All ranks wait for the slowest, whose products or links were the slowest ones.
    slowest = max(found, key=lambda one: one.cost.seconds)
    took = found[0].seconds
    yield Ratio(f"{case}, step", 1e3 * slowest.cost.seconds, 1e3 * took, "ms", "measured")
    sent = sum(size for _, size, _ in found[0].cost.transfers)
    yield Ratio(f"{case}, sent by a rank", sent / 1e6, found[0].sent / 1e6, "MB", "counted")
    held = max(one.peak for one in found)
    yield Ratio(f"{case}, held", found[0].cost.memory.total / 1e6, held / 1e6, "MB", "counted")
