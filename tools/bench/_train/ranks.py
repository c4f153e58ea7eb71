"""Checks, counts, and times in turns, on every rank of the benchmark `train`.

All variants live in the same processes and take turns of a few steps, so that whatever else the
machine does hits them alike.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from vescale_parallel.memory import measured

from tools.bench import in_turn
from tools.bench._train.bubble import Bubble, bubble_of
from tools.bench._train.cases import CONTEXT, GRAPHS, LAYOUTS, STAGED, STAGED_OURS
from tools.bench._train.memory import Peak, peak_of, storages_now
from tools.bench._train.model import Sizes, batch_of
from tools.bench._train.profiling import Profile, profiled
from tools.bench._train.training import OneDevice, Training
from tools.bench._wire import Wire

CHECKED = 4
"""Steps whose losses are compared with one device; plans, programs and states are made there."""

TOLERANCE = 1e-5
"""Largest relative difference of a loss from that of one device."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured.

    Attributes:
        layout: a name in `LAYOUTS`.
        rounds: how often every variant has a turn that is timed.
        turn: steps of one turn.
        profile: steps that are profiled afterwards; none where 0.
        only: the variants that run; all where empty.
    """

    layout: str
    sizes: Sizes
    rounds: int = 15
    turn: int = 4
    profile: int = 0
    only: tuple[str, ...] = ()


@dataclass
class RankResult:
    """What one rank found of one variant.

    Attributes:
        losses: of the first steps.
        collectives, sent: of one step, by kind, and the bytes that this rank sends.
        seconds: of a step, one number for each turn.
        parts: seconds of what a step is made of, each by itself, by name: its floor.
        taken: the most bytes that a step takes of the allocator beyond what was there, by its
            events: of what is compiled, which runs under no meter of operators.
    """

    losses: list[float] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    peak: Peak = field(default_factory=lambda: Peak(0, 0, 0, 0))
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    taken: int = 0
    profile: Profile | None = None
    bubble: Bubble | None = None

    @property
    def memory(self) -> int:
        """Bytes at the peak of a step: what was there before it, and the most that it takes."""
        return self.peak.held + self.taken

    @property
    def floor(self) -> float:
        """Seconds of all its parts; 0 where there are none."""
        return sum(statistics.median(one) for one in self.parts.values())

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


class DifferentLosses(AssertionError):
    """A variant does not compute what one device computes, so there is nothing to compare."""


def compare(rank: int, world_size: int, job: Job) -> dict[str, RankResult]:
    """Measure every variant of the job on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch's DTensor and fused optimizers, about CPUs
    axes, builds = (LAYOUTS | STAGED | CONTEXT | GRAPHS)[job.layout]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    expected = _losses(OneDevice(job.sizes), job.sizes)
    trainings: dict[str, Training] = {}
    found: dict[str, RankResult] = {}
    for name, build in builds.items():
        if job.only and name not in job.only:
            continue
        _tell(rank, f"{job.layout}, hidden {job.sizes.hidden}: {name}, losses and memory")
        others = storages_now()
        trainings[name] = build(job.sizes, mesh)
        found[name] = _counted(trainings[name], job.sizes, others)
        require_alike(name, found[name].losses, expected)
    _take_turns(rank, job, trainings, found)
    if STAGED_OURS in trainings:
        batch = batch_of(job.sizes, CHECKED)
        found[STAGED_OURS].bubble = bubble_of(trainings[STAGED_OURS], batch)
    if job.profile:
        for name, training in trainings.items():
            found[name].profile = _profiled(training, job)
    return found


def _losses(training: Training, sizes: Sizes) -> list[float]:
    return [training.value(training.step(*batch_of(sizes, step))) for step in range(CHECKED)]


def require_alike(name: str, losses: list[float], expected: list[float]) -> None:
    """Raise where a loss differs; every rank has the same numbers, so all raise or none."""
    for step, (loss, one) in enumerate(zip(losses, expected, strict=True)):
        if not abs(loss - one) <= TOLERANCE * abs(one):
            raise DifferentLosses(
                f"{name}: the loss of step {step} is {loss!r}, and {one!r} on one device: more "
                f"than {TOLERANCE:g} apart. It computes something else, so it is not timed."
            )


def _counted(training: Training, sizes: Sizes, others: dict[int, Any]) -> RankResult:
    """Losses of the first steps, then the collectives of one, and the memory of the next."""
    found = RankResult(losses=_losses(training, sizes))
    batch = batch_of(sizes, CHECKED)
    found.taken = measured(lambda: training.step(*batch)).peak
    if getattr(training, "compiled", False):
        return found
    with replayed_under_modes():
        with Wire() as wire:
            training.step(*batch)
        found.peak = peak_of(training, batch, others)
    found.collectives, found.sent = dict(wire.counts), wire.bytes
    return found


def replayed_under_modes() -> AbstractContextManager[Any]:
    """Captured functions replay though a meter watches: what it counts is the replay's."""
    # Where a dispatch mode is active a captured function runs as it was written. That is right
    # for users, who want to see its ops, and would count the eager step twice here.
    return patch("vescale_dtensor._capture.capture.dispatch_modes", return_value=False)


def _take_turns(
    rank: int, job: Job, trainings: dict[str, Training], found: dict[str, RankResult]
) -> None:
    """Time the variants, a few steps each in turn; the one that begins changes."""
    batch = batch_of(job.sizes, CHECKED)
    parts = {name: _parts(training, batch) for name, training in trainings.items()}
    gc.collect()
    gc.freeze()  # a collection of all variants' objects would hit whoever has its turn
    for number in range(job.rounds + 1):
        _tell(rank, f"{job.layout}, hidden {job.sizes.hidden}: round {number} of {job.rounds}")
        for name in in_turn(trainings, number):
            seconds = _turn(partial(trainings[name].step, *batch), job.turn)
            if number:  # the first round only warms up
                found[name].seconds.append(seconds)
            for part, run in parts[name].items():
                seconds = _turn(run, job.turn)
                if number:
                    found[name].parts.setdefault(part, []).append(seconds)
    gc.unfreeze()


def _parts(training: Training, batch: tuple[Tensor, Tensor]) -> dict[str, Callable[[], object]]:
    made: Any = getattr(training, "parts_alone", None)
    return {} if made is None else made(batch)


def _turn(step: Callable[[], object], steps: int) -> float:
    """Seconds of one step, from when all ranks begin to when the last one is done."""
    step()  # after another variant's turn nothing is in the caches
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def _profiled(training: Training, job: Job) -> Profile:
    batch = batch_of(job.sizes, CHECKED)
    training.step(*batch)
    dist.barrier()
    return profiled(lambda: training.step(*batch), job.profile)


def _tell(rank: int, text: str) -> None:
    """One line of progress, on a terminal only; the worker's own output is kept for its caller."""
    stream = sys.__stderr__
    if rank == 0 and stream is not None and stream.isatty():
        print(f"\r\x1b[K{text}", end="", file=stream, flush=True)


def mesh_size(layout: str) -> int:
    """Ranks of a layout."""
    size = 1
    for extent in (LAYOUTS | GRAPHS)[layout][0].values():
        size *= extent
    return size
