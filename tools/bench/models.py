"""A training step of models that nobody adapted: ours eager, static, as a graph, against FSDP2.

Unmodified models of transformers, small, on gloo processes of one thread each: forward, backward,
clipping, AdamW (fused), with the checks that are on by default. All sides live in the same
processes and take turns; before anything is timed, the losses of their first steps must be those of
one plain device. torch's is FSDP2, over its tensor parallelism where a model declares a plan of
styles that torch has; else it is sharded over all ranks.

Tokens a second are those of the whole mesh on the clock. `ms own` is processor time of one rank in
a step, the mean over ranks, which other programs and too few cores hardly change. `MB live` are
storages of tensors at the highest moment of a step. `of calls` is the share of the calls of
captured units that were replayed: a unit whose replay is not faster than its forward runs eagerly.
`s first` is what it takes to distribute a model and make the first step.

    nox -s bench -- models                                      # all: hours on two idle cores
    nox -s bench -- models --models Llama T5 --layouts dp2.zero3 --hidden 64
    nox -s bench -- models --models BERT --layouts tp2 --hidden 64 --only eager --rounds 3 --turn 10
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from vescale_comm.testing import run

from tools.bench import Ratio
from tools.bench._models.ranks import (
    EAGER,
    LAYOUTS,
    SIDES,
    STATIC,
    STEP,
    TORCH,
    Job,
    SideResult,
    compare,
    mesh_size,
)
from tools.bench._models.zoo import ZOO, Sizes, batch_of, tokens_of

HIDDEN = (64, 512)
ROUNDS = 5
TURNS = {64: 40, 512: 8}
"""Steps of a turn, by the hidden size."""

LARGE = {"Llama": ("dp2.zero3", "dp2.tp2.zero3")} | dict.fromkeys(
    ("BERT", "Mixtral"), ("dp2.zero3", "dp2.tp2.zero3")
)
"""Layouts of the models that are measured at more than 64, where nothing else is asked for."""

_FOUND: dict[str, Any] = {}


def parser() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    made = argparse.ArgumentParser(
        prog="nox -s bench -- models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--models", nargs="+", choices=ZOO, default=[], help="default: all")
    add("--layouts", nargs="+", choices=LAYOUTS, default=[], help="default: all")
    add("--hidden", nargs="+", type=int, default=list(HIDDEN), help="default: 64 512")
    add("--rounds", type=int, default=ROUNDS, help="turns of each side (default: 5)")
    add("--turn", type=int, help="steps of a turn (default: 40; 8 where hidden > 64)")
    add("--layers", type=int, help="of each stack (default: 4; 2 of T5, Mamba, and experts)")
    add("--batch", type=int, default=8, help="sequences of a global batch (default: 8)")
    add("--length", type=int, default=32, help="tokens of a sequence (default: 32)")
    others = [name for name in SIDES if name != TORCH]
    add("--only", nargs="+", choices=others, default=[], help="these beside torch's")
    return made


def measure(
    models: Sequence[str] = (),
    layouts: Sequence[str] = (),
    hidden: Sequence[int] = HIDDEN,
    rounds: int = ROUNDS,
    turn: int | None = None,
    only: Sequence[str] = (),
    **sizes: Any,
) -> Iterator[Ratio]:
    """Every side against torch's, static against eager, the graph against static."""
    if find_spec("transformers") is None:
        raise SystemExit("models: transformers is not installed, which has the models")
    _FOUND.clear()
    for width in hidden:
        steps = turn or TURNS.get(width, TURNS[512])
        for model, layout in _cells(width, models, layouts):
            job = Job(
                model=model,
                layout=layout,
                sizes=Sizes(hidden=width, **sizes),
                rounds=rounds,
                turn=steps,
                only=tuple(only),
            )
            found = run(compare, mesh_size(layout), job, timeout=_patience(job))
            _FOUND[_case(job)] = [{k: asdict(one) for k, one in rank.items()} for rank in found]
            yield from _rows(job, found)


def _cells(width: int, models: Sequence[str], layouts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The models and layouts at a hidden size."""
    large = width > 64 and not models
    for model in models or (LARGE if large else ZOO):
        for layout in layouts or (LARGE[model] if large else LAYOUTS):
            yield model, layout


def _case(job: Job) -> str:
    return f"{job.model} {job.layout} {job.sizes.hidden}"


def _patience(job: Job) -> float:
    """Seconds after which a rank is given up: generous, for busy machines."""
    steps = len(SIDES) * ((job.rounds + 1) * (job.turn + 1) + 10) + 80
    return 120 + steps * (2 if job.sizes.hidden <= 128 else 15)


def _rows(job: Job, found: Sequence[dict[str, SideResult]]) -> Iterator[Ratio]:
    """Times on the clock are those of rank 0, which waits for all; own times are means."""
    here = [name for name, one in found[0].items() if one.is_measured]
    small = job.sizes.hidden <= 64
    goals = {EAGER: 1.2 if small else 1.05}
    for name in (one for one in here if one != TORCH):
        yield _speed(job, found[0], name, TORCH, goals.get(name))
        yield _own(job, found, name, TORCH)
        yield from _counted(job, found, name)
    for name, against, goal in (
        (STATIC, EAGER, 1.15 if small else 0.98),
        (STEP, STATIC, 1.0),
    ):
        if {name, against} <= set(here):
            yield _speed(job, found[0], name, against, goal)
            yield _own(job, found, name, against)
    if STATIC in here:
        yield Ratio(f"{_case(job)} {STATIC}", found[0][STATIC].replayed, 1, "of calls", "all")


def _speed(
    job: Job, found: dict[str, SideResult], name: str, against: str, goal: float | None
) -> Ratio:
    tokens = tokens_of(batch_of(job.model, job.sizes, 0))
    speeds = (tokens / found[name].median, tokens / found[against].median)
    return Ratio(f"{_case(job)} {name}", *speeds, "tok/s", against, goal, more_is_better=True)


def _own(job: Job, found: Sequence[dict[str, SideResult]], name: str, against: str) -> Ratio:
    ours, other = (1e3 * sum(one[n].own for one in found) / len(found) for n in (name, against))
    return Ratio(f"{_case(job)} {name}", ours, other, "ms own", against)


def _counted(job: Job, found: Sequence[dict[str, SideResult]], name: str) -> Iterator[Ratio]:
    """Memory, of the rank with the most, and what is sent, against torch's."""
    case = f"{_case(job)} {name}"
    ours, torchs = (max(one[n].peak for one in found) / 1e6 for n in (name, TORCH))
    yield Ratio(case, ours, torchs, "MB live", TORCH, 1.0)
    mine, reference = found[0][name], found[0][TORCH]
    yield Ratio(case, mine.first, reference.first, "s first", TORCH)
    if reference.collectives:
        yield Ratio(case, mine.collectives, reference.collectives, "coll.", TORCH)
        yield Ratio(case, mine.sent / 1e6, reference.sent / 1e6, "MB out", TORCH)


def details() -> tuple[str, Any]:
    """What sides say of themselves, as text; all that was found, as data."""
    lines = []
    for case, ranks in _FOUND.items():
        for name, one in ranks[0].items():
            lines += [f"{case} {name}: {words}" for words in one["said"]]
    return "\n".join(lines), _FOUND
