"""A training step of a Llama-style model on four processes: ours, torch's, and one by hand.

Every variant trains the same model on the same batches with the same optimizer (AdamW, fused), in
the same four gloo processes of one thread each, and they take turns of a few steps. Before
anything is timed, the losses of the first steps must be those of one plain device within 1e-5. The
figures are tokens per second, bytes at the peak of a step, collectives, and bytes sent per rank.
Bytes are counted twice: `MB` is what was there before the step and the most that it takes of the
allocator, what the transport takes for itself included (gloo gathers into memory of its own, and
sums up a copy); `MB live` are storages of tensors (see `_train/memory.py`), without the transport.
torch's variant is of the layout's kind: DDP where ours holds whole parameters over dp, FSDP2 where
it shards them (`_train/by_torch.py` says how each is helped). The captured forms, which remove
Python and generate no kernels, also face torch's with its blocks compiled.

    nox -s bench -- train                                  # all: some minutes on two idle cores
    nox -s bench -- train --hidden 64 --layouts dp2.tp2    # one case
    nox -s bench -- train --hidden 64 --profile            # and where the time of a step goes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._train.cases import (
    COMPILED_TORCH,
    GOALS,
    HAND,
    LAYOUTS,
    MEMORY_GOAL,
    SHARDED,
    STATIC_FORMS,
)
from tools.bench._train.details import Details
from tools.bench._train.model import Sizes
from tools.bench._train.ranks import Job, RankResult, compare, mesh_size

HIDDEN = (64, 512)
ROUNDS = {64: 13, 512: 5}
"""Turns of each variant that are timed, by the hidden size."""

_details = Details()
"""What the last `measure` found beside ratios, for `details`."""


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    add("--hidden", nargs="+", type=int, default=list(HIDDEN), help="default: 64 512")
    add("--rounds", type=int, help="turns of each variant (default: 13; 5 where hidden > 64)")
    add("--turn", type=int, default=3, help="steps of a turn (default: 3)")
    add("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    add("--batch", type=int, default=8, help="sequences of a global batch (default: 8)")
    add("--length", type=int, default=32, help="tokens of a sequence (default: 32)")
    add("--only", nargs="+", default=[], metavar="VARIANT", help="these beside torch's")
    add(
        "--profile",
        nargs="?",
        type=int,
        const=5,
        default=0,
        metavar="STEPS",
        help="afterwards profile each variant for some steps (default: 5) on rank 0: time per op, "
        "per collective (a synchronous one is waited for in full), and what is left: Python, "
        "autograd's engine, hooks, dispatch",
    )
    return made


def measure(
    layouts: Sequence[str] = tuple(LAYOUTS),
    hidden: Sequence[int] = HIDDEN,
    rounds: int | None = None,
    turn: int = 3,
    profile: int = 0,
    only: Sequence[str] = (),
    **sizes: int,
) -> Iterator[Ratio]:
    """Every variant against torch's, and the whole step against the one by hand and its floor."""
    _details.clear()
    for layout in layouts:
        for width in hidden:
            job = Job(
                layout=layout,
                sizes=Sizes(hidden=width, **sizes),
                rounds=rounds or ROUNDS.get(width, ROUNDS[512]),
                turn=turn,
                profile=profile,
                only=_with_reference(layout, only),
            )
            found = run(compare, mesh_size(layout), job, timeout=_patience(job))
            _details.note(job, found)
            yield from _rows(job, found)


def _with_reference(layout: str, only: Sequence[str]) -> tuple[str, ...]:
    return (next(iter(LAYOUTS[layout][1])), *only) if only else ()


def _patience(job: Job) -> float:
    """Seconds after which a rank is given up: generous, for busy machines."""
    steps = len(LAYOUTS[job.layout][1]) * (job.rounds * (job.turn + 1) + 10 + job.profile)
    return 120 + steps * (2 if job.sizes.hidden <= 128 else 15)


def _rows(job: Job, found: Sequence[dict[str, RankResult]]) -> Iterator[Ratio]:
    """Times are those of rank 0, which waits for all; memory is that of the rank with the most."""
    first, *others = found[0]
    case = f"{job.layout} {job.sizes.hidden}"
    for name in others:
        goal = GOALS.get((job.layout, job.sizes.hidden, name))
        yield _speed(f"{case} {name}", job, found[0], name, first, goal)
    for against in (one for one in (HAND, COMPILED_TORCH) if one in found[0]):
        for name in (one for one in STATIC_FORMS if one in found[0]):
            goal = 1.0 if against == HAND else None
            yield _speed(f"{case} {name}", job, found[0], name, against, goal)
    for name in (one for one in others if found[0][one].parts):
        took, floor = 1e3 * found[0][name].median, 1e3 * found[0][name].floor
        yield Ratio(f"{case} {name}", took, floor, "ms", "its operators + its collectives")
    for name in (one for one in others if found[0][one].collectives):  # of compiled code none
        yield from _counted(job, found, name, first)


def _counted(
    job: Job, found: Sequence[dict[str, RankResult]], name: str, first: str
) -> Iterator[Ratio]:
    """Bytes and collectives of one variant against the first."""
    case = f"{job.layout} {job.sizes.hidden} {name}"
    goal = MEMORY_GOAL if job.layout in SHARDED and name != HAND else None
    ours, torchs = (max(one[n].memory for one in found) / 1e6 for n in (name, first))
    yield Ratio(case, ours, torchs, "MB", first, goal)
    ours, torchs = (max(one[n].peak.total for one in found) / 1e6 for n in (name, first))
    yield Ratio(case, ours, torchs, "MB live", first, goal)
    ours, torchs = (sum(found[0][n].collectives.values()) for n in (name, first))
    yield Ratio(case, ours, torchs, "coll.", first)
    ours, torchs = (found[0][n].sent / 1e6 for n in (name, first))
    yield Ratio(case, ours, torchs, "MB out", first)


def _speed(
    name: str, job: Job, found: dict[str, RankResult], ours: str, against: str, goal: float | None
) -> Ratio:
    tokens = job.sizes.tokens
    speeds = (tokens / found[ours].median, tokens / found[against].median)
    return Ratio(name, *speeds, "tok/s", against, goal, more_is_better=True)


def details() -> tuple[str, dict[str, Any]]:
    """What the last `measure` found beside ratios: as text for people, and as data."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return _details.told()
