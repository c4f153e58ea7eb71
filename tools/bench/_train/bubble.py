"""Measures how long ranks of a pipeline wait, beside what the simulator says."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from vescale_parallel._pipeline import step as steps
from vescale_parallel._pipeline.run.measurements import Stopwatch
from vescale_parallel._pipeline.run.runner import Runner
from vescale_parallel.schedules import Schedule, StageTimes, simulate_schedule


@dataclass(frozen=True)
class Bubble:
    """The schedule of a step, from its first action on any rank to its last one.

    Attributes:
        measured: the part of all ranks' time in which they waited.
        simulated: the same on paper, for the stages' mean times in that step.
        seconds: how long it took.
        predicted: the same on paper.
    """

    measured: float
    simulated: float
    seconds: float
    predicted: float


def bubble_of(training: Any, batch: tuple[Tensor, Tensor], steps_: int = 7) -> Bubble:
    """Measure some steps; the one of the median time counts. On every rank."""
    found = [_one(training, batch) for _ in range(steps_)]
    return sorted(found, key=lambda one: one.seconds)[len(found) // 2]


def _one(training: Any, batch: tuple[Tensor, Tensor]) -> Bubble:
    watch = Stopwatch("cpu")
    seen: list[Schedule] = []

    def watched(
        scene: Any, lines: Any, schedule: Schedule, parts: Any, _: Any, **words: Any
    ) -> Runner:
        seen.append(schedule)
        return Runner(scene, lines, schedule, parts, watch, **words)

    with patch.object(steps, "Runner", watched):
        training.step(*batch)
    (schedule,) = seen
    rank = dist.get_rank()
    own = {
        stage: watch.times(stage, 1.0, recomputes=False, of=statistics.fmean)
        for stage, place in enumerate(schedule.stage_ranks)
        if place == rank
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (own, watch.busy, watch.began, watch.ended))
    every: dict[int, StageTimes] = {s: t for times, *_ in told for s, t in times.items()}
    # Clocks of processes of one machine are one clock.
    seconds = max(one[3] for one in told) - min(one[2] for one in told)
    paper = simulate_schedule(schedule, [every[stage] for stage in range(schedule.stages)])
    measured = 1 - sum(one[1] for one in told) / (seconds * len(told))
    return Bubble(measured, paper.bubble, seconds, paper.seconds)
