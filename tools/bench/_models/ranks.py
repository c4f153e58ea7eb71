"""What every rank does in the benchmark `models`: check, count, and then time in turns."""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from vescale_comm import CommError
from vescale_dtensor import DTensorError
from vescale_parallel import ParallelError

from tools.bench import in_turn
from tools.bench._models.sides import ByTorch, OneDevice, OnGraph, Ours, Static
from tools.bench._models.zoo import Sizes, batch_of
from tools.bench._train.memory import peak_of, storages_now
from tools.bench._train.ranks import replayed_under_modes, require_alike
from tools.bench._wire import Wire

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2.zero3": {"dp": 2},
    "dp4.zero3": {"dp": 4},
    "dp2.tp2.zero3": {"dp": 2, "tp": 2},
    "tp2": {"tp": 2},
}
TORCH, EAGER, STATIC, STEP = "torch", "eager", "static", "train_step"
SIDES: dict[str, type[OneDevice]] = {TORCH: ByTorch, EAGER: Ours, STATIC: Static, STEP: OnGraph}
"""The first is what the others are held to."""

CHECKED = 4
SETTLED = 70
"""Steps after which a static model has decided which of its units it replays."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured: `only` names the sides beside torch's; all where empty."""

    model: str
    layout: str
    sizes: Sizes
    rounds: int
    turn: int
    only: tuple[str, ...] = ()


@dataclass
class SideResult:
    """What one rank found of one side.

    Attributes:
        first: seconds until the first step is done: to distribute the model, to make plans.
        seconds, processor: of a step, one number for each turn: on the clock, and of processor
            time of this rank's process, in which it neither waits nor others compute.
        peak: bytes that are alive at the highest moment of a step.
        collectives, sent: of a step, and the bytes that this rank sends.
        replayed: share of the calls of units that were replayed, while they were timed.
        said: why it, or a part of it, does not run as was asked for, in words.
        is_measured: whether it ran at all.
    """

    losses: list[float] = field(default_factory=list)
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    peak: int = 0
    collectives: int = 0
    sent: int = 0
    replayed: float = 0.0
    said: list[str] = field(default_factory=list)
    is_measured: bool = True

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def own(self) -> float:
        """Processor seconds of a step."""
        return statistics.median(self.processor)


def mesh_size(layout: str) -> int:
    """Ranks of a layout."""
    return prod(LAYOUTS[layout].values())


def compare(rank: int, world_size: int, job: Job) -> dict[str, SideResult]:
    """Measure every side of the job on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    axes = LAYOUTS[job.layout]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    expected = _losses(OneDevice(job.model, job.sizes, mesh), job)
    sides: dict[str, OneDevice] = {}
    found: dict[str, SideResult] = {}
    for name, build in SIDES.items():
        if job.only and name not in (TORCH, *job.only):
            continue
        found[name] = one = SideResult()
        others = storages_now()
        try:
            side, one.first, loss = _begun(build, job, mesh)
        except (CommError, DTensorError, ParallelError) as error:
            # Every rank raises alike: none of them has this side.
            one.said, one.is_measured = [f"{type(error).__name__}: {error}"], False
            continue
        sides[name] = side
        one.losses = [loss, *_losses(side, job, 1)]
        require_alike(name, one.losses, expected)
        _count(side, job, one, others)
    _take_turns(job, sides, found)
    return found


def _begun(build: type[OneDevice], job: Job, mesh: DeviceMesh) -> tuple[OneDevice, float, float]:
    """A side that has made its first step, the seconds until then, and its loss."""
    start = time.perf_counter()
    side = build(job.model, job.sizes, mesh)
    loss = side.step(batch_of(job.model, job.sizes, 0))
    return side, time.perf_counter() - start, side.value(loss)


def _losses(side: OneDevice, job: Job, first: int = 0) -> list[float]:
    batches = (batch_of(job.model, job.sizes, step) for step in range(first, CHECKED))
    return [side.value(side.step(batch)) for batch in batches]


def _count(side: OneDevice, job: Job, found: SideResult, others: dict[int, Any]) -> None:
    """What a step sends, and the most that is alive in one, when all is as it stays."""
    batch = batch_of(job.model, job.sizes, CHECKED)
    if isinstance(side, Static):
        for _ in range(SETTLED):
            side.step(batch)
    with replayed_under_modes():
        with Wire() as wire:
            side.step(batch)
        meter: Any = peak_of  # whose batches are two tensors
        peak = meter(side, (batch,), others)
    found.collectives, found.sent, found.peak = sum(wire.counts.values()), wire.bytes, peak.total
    found.said = side.said()


def _take_turns(job: Job, sides: dict[str, OneDevice], found: dict[str, SideResult]) -> None:
    """Time the sides, some steps each in turn; the one that begins changes."""
    batch = batch_of(job.model, job.sizes, CHECKED)
    before = {name: side.replays() for name, side in sides.items()}
    gc.collect()
    gc.freeze()  # a collection of all sides' objects would hit whoever has its turn
    for number in range(job.rounds + 1):
        for name in in_turn(sides, number):
            seconds, processor = _turn(partial(sides[name].step, batch), job.turn)
            if number:  # the first round only warms up
                found[name].seconds.append(seconds)
                found[name].processor.append(processor)
            else:
                before[name] = sides[name].replays()
    gc.unfreeze()
    steps = job.rounds * (job.turn + 1)
    for name, side in sides.items():
        replays, units = side.replays()
        if units:
            found[name].replayed = (replays - before[name][0]) / (units * steps)


def _turn(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Seconds of one step, from when all ranks begin to when the last one is done; and its own."""
    step()  # after another side's turn nothing is in the caches
    dist.barrier()
    start, own = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    took = time.process_time() - own
    dist.barrier()
    return (time.perf_counter() - start) / steps, took / steps
