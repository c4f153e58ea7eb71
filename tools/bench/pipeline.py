"""A training step of a Llama-style model in stages: ours against torch's pipelining.

Both train the same model on the same batches in the same gloo processes of one thread each, and
take turns of a few steps; before anything is timed the losses of the first steps must be those of
one plain device within 1e-5. Figures: tokens per second, live bytes at the peak of a step on the
rank with the most, messages and collectives, bytes sent by rank 0. torch's keeps no outputs; it
leaves the loss on the last stage and compares nothing, where our step compares what ranks call it
with, and gives each of them the loss: that is in its time. And the bubble of our step, from
its first action to its last one, beside the simulator's for the stages' mean times. On a machine
with fewer cores than ranks, ranks that wait give their core to those that compute: times are then
those of all work together, and show no bubble.

    nox -s bench -- pipeline                            # 2 ranks, all schedules that torch has
    nox -s bench -- pipeline --ranks 4 --schedules 1f1b
    nox -s bench -- pipeline --schedules 1f1b --profile # and where the time of a step goes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._train.cases import STAGED_OURS, STAGED_STATIC, STAGED_TORCH, staged_layout
from tools.bench._train.details import Details
from tools.bench._train.model import Sizes
from tools.bench._train.ranks import Job, RankResult, compare

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")

_details = Details()


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="default: all")
    add("--ranks", type=int, choices=(2, 4), default=2, help="stages' ranks (default: 2)")
    add("--hidden", nargs="+", type=int, default=[64, 256], help="default: 64 256")
    add("--rounds", type=int, default=7, help="turns of each variant (default: 7)")
    add("--turn", type=int, default=3, help="steps of a turn (default: 3)")
    add("--layers", type=int, default=8, help="blocks of the model (default: 8)")
    add("--batch", type=int, default=16, help="sequences of a batch (default: 16)")
    add("--length", type=int, default=32, help="tokens of a sequence (default: 32)")
    add("--profile", nargs="?", type=int, const=5, default=0, metavar="STEPS", help="of rank 0")
    return made


def measure(
    schedules: Sequence[str] = SCHEDULES,
    ranks: int = 2,
    hidden: Sequence[int] = (64, 256),
    rounds: int = 7,
    turn: int = 3,
    profile: int = 0,
    **sizes: int,
) -> Iterator[Ratio]:
    """Ours against torch's, schedule by schedule."""
    _details.clear()
    for schedule in schedules:
        for width in hidden:
            job = Job(
                layout=staged_layout(ranks, schedule),
                sizes=Sizes(hidden=width, **{"layers": 8, "batch": 16, **sizes}),
                rounds=rounds,
                turn=turn,
                profile=profile,
            )
            found = run(compare, ranks, job, timeout=600)
            yield from _rows(_details.note(job, found), job.sizes.tokens, found)


def _rows(case: str, tokens: int, found: Sequence[dict[str, RankResult]]) -> Iterator[Ratio]:
    ours, torchs = (found[0][name] for name in (STAGED_OURS, STAGED_TORCH))
    speeds = tokens / ours.median, tokens / torchs.median
    static = tokens / found[0][STAGED_STATIC].median
    for name, speed in ((case, speeds[0]), (f"{case} static", static)):
        yield Ratio(name, speed, speeds[1], "tok/s", STAGED_TORCH, 1.0, more_is_better=True)
    names = STAGED_OURS, STAGED_STATIC, STAGED_TORCH
    peaks = [max(one[name].peak.total for one in found) / 1e6 for name in names]
    yield Ratio(case, peaks[0], peaks[2], "MB", STAGED_TORCH, 1.0)
    yield Ratio(f"{case} static", peaks[1], peaks[2], "MB", STAGED_TORCH, 1.0)
    counts = [sum(one.collectives.values()) for one in (ours, torchs)]
    yield Ratio(case, counts[0], counts[1], "coll.", STAGED_TORCH)
    yield Ratio(case, ours.sent / 1e6, torchs.sent / 1e6, "MB out", STAGED_TORCH)
    assert ours.bubble is not None
    pairs = {"% bubble": (ours.bubble.measured, ours.bubble.simulated)}
    pairs["s schedule"] = (ours.bubble.seconds, ours.bubble.predicted)
    for unit, (measured, simulated) in pairs.items():
        by = 100 if unit.startswith("%") else 1
        yield Ratio(case, measured * by, simulated * by, unit, "simulated")


def details() -> tuple[str, dict[str, Any]]:
    """What the last `measure` found beside ratios: as text for people, and as data."""
    return _details.told()
