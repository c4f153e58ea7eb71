"""Simulates when each action of a schedule runs, for given times of stages, and its cost."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Schedule
from vescale_parallel._schedules.check import (
    ORDER,
    Columns,
    columns_of,
    in_order,
    needs_of,
    require_enough,
    results_of,
)


@dataclass(frozen=True)
class StageTimes:
    """What one stage takes for one microbatch, in any unit of time; and what it keeps.

    Attributes:
        forward: of a forward.
        inputs: of the gradients of inputs; a whole backward takes `inputs + weights`.
        weights: of the gradients of weights.
        kept: what a microbatch keeps from its forward to its backward, in any unit of memory.
        kept_for_weights: the part of it that gradients of weights need after those of inputs.

    Raises:
        PlanError: one of them is negative, infinite or no number.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    kept: float = 1.0
    kept_for_weights: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no stage takes: simulations of it would be wrong, or never end."""
        for what, value in vars(self).items():
            require_amount(f"times of a stage: {what}", value)

    def of(self, action: Action) -> float:
        """The time of an action."""
        kind = action.kind
        if kind == "F":
            return self.forward
        if kind == "B":
            return self.inputs + self.weights
        return self.inputs if kind == "I" else self.weights

    def keeps(self, action: Action) -> tuple[float, float]:
        """What memory changes by when an action begins, and when it ends."""
        kind = action.kind
        if kind == "F":
            return self.kept, 0.0
        if kind == "B":
            return 0.0, -self.kept
        return 0.0, self.kept_for_weights - self.kept if kind == "I" else -self.kept_for_weights


def require_amount(what: str, value: float) -> None:
    """Refuse a time or a size that is negative, infinite or no number.

    Raises:
        PlanError: it is.
    """
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(f"{what} is {value:g}; it has to be a number of at least 0.")


# In the order in which columns number kinds.
_EACH_KIND: Final = tuple(Action(kind, 0, 0) for kind in ORDER)

EQUAL: Final = StageTimes()
"""Forwards and both halves of backwards take 1."""


class Span(NamedTuple):
    """An action in time.

    Attributes:
        action: what runs.
        start: when it begins.
        end: when it ends.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Attributes:
        schedule: the schedule.
        starts: for each rank when its actions begin.
        ends: for each rank when they end.
        seconds: when the last one ends, in the unit of the stages' times.
        peaks: for each rank the most that it keeps at once, in the unit of the stages' memory.
        messages: how many activations and gradients pass from rank to rank.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...] = field(repr=False)
    ends: tuple[tuple[float, ...], ...] = field(repr=False)
    seconds: float
    peaks: tuple[float, ...]
    messages: int

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each rank its actions in time."""
        # Made when asked for: so many objects take longer than the simulation.
        rows = zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *row)) for row in rows)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        rows = zip(self.starts, self.ends, strict=True)
        return tuple(sum(map(operator.sub, end, start)) for start, end in rows)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait, from 0 to 1."""
        return 1 - sum(self.busy) / (self.seconds * len(self.ends)) if self.seconds else 0.0

    @property
    def peak(self) -> float:
        """The most that any rank keeps at once."""
        return max(self.peaks)


def simulate_schedule(
    schedule: Schedule,
    times: StageTimes | Sequence[StageTimes] = EQUAL,
    *,
    send: float = 0.0,
) -> Timeline:
    """Run a schedule on paper: each rank does its actions in order, as soon as it can.

    Args:
        schedule: the schedule.
        times: of every stage, or one for each.
        send: how long a message is under way; ranks compute meanwhile.

    Raises:
        PlanError: there are not as many times as stages, ranks wait for each other, a microbatch is
            left out, or `send` is negative or no number.
    """
    require_amount(f"schedule {schedule.name}: send", send)
    stages = schedule.stages
    each = (times,) * stages if isinstance(times, StageTimes) else tuple(times)
    if len(each) != stages:
        raise PlanError(f"schedule {schedule.name}: {len(each)} times for {stages} stages.")
    # Forwards alone are run on paper, too; tables have a place for each stage and microbatch.
    require_enough(schedule, 1)
    columns = columns_of(schedule)
    needs = needs_of(schedule, columns)
    # What is under way from another rank, for each action.
    under_way = _from_elsewhere(schedule, columns)
    # Added to what is waited for and not to the sender: a message is under way while both compute.
    late = [one.tolist() for one in columns.by_rank(under_way * send)]
    durations = [[one.of(kind) for kind in _EACH_KIND] for one in each]
    takes = [one.tolist() for one in columns.by_rank(_looked_up(columns, durations))]
    starts: list[list[float]] = [[] for _ in needs]
    ends: list[list[float]] = [[] for _ in needs]
    free = [0.0] * len(needs)
    ended = [0.0] * (results_of(schedule) + 1)  # the last stands for what needs nothing
    # In an order in which all that an action needs has its end already, so that no queue of events
    # is needed.
    for rank, first, behind in in_order(schedule, needs):
        own, other, results = needs[rank]
        start_row, end_row, now = starts[rank], ends[rank], free[rank]
        for at in range(first, behind):
            begin = max(now, ended[own[at]], ended[other[at]] + late[rank][at])
            ended[results[at]] = now = begin + takes[rank][at]
            start_row.append(begin)
            end_row.append(now)
        free[rank] = now
    spans = tuple(map(tuple, starts)), tuple(map(tuple, ends))
    peaks, messages = _peaks(columns, each), int(under_way.sum())
    return Timeline(schedule, *spans, max(free, default=0.0), peaks, messages)


def _from_elsewhere(schedule: Schedule, columns: Columns) -> np.ndarray[Any, Any]:
    """For each action whether another rank sends what it needs."""
    sender = columns.stages + np.where(columns.kinds == 0, -1, 1)
    there = (columns.kinds != 2) & (sender >= 0) & (sender < schedule.stages)
    places = np.array(schedule.stage_ranks)
    found: np.ndarray[Any, Any] = there & (places[np.where(there, sender, 0)] != columns.ranks)
    return found


def _looked_up(columns: Columns, by_stage: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """The number of each action, of those by stage and kind."""
    found: np.ndarray[Any, Any] = np.array(by_stage, np.float64)[columns.stages, columns.kinds]
    return found


def _peaks(columns: Columns, each: Sequence[StageTimes]) -> tuple[float, ...]:
    """The most that each rank keeps: its actions follow each other, so their order is enough."""
    changes = [[one.keeps(kind) for kind in _EACH_KIND] for one in each]
    at_start = _looked_up(columns, [[start for start, _ in row] for row in changes])
    at_end = _looked_up(columns, [[end for _, end in row] for row in changes])
    pairs = zip(columns.by_rank(at_start), columns.by_rank(at_end), strict=True)
    # By rank, and not over all: sums of sizes that are no whole numbers would differ by rounding.
    kept = (np.stack(pair, 1).ravel().cumsum() for pair in pairs)
    # Every second number is that of an action which runs, with all that it needs.
    return tuple(float(np.max(one[::2], initial=0.0)) for one in kept)
