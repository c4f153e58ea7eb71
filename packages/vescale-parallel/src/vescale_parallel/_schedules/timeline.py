"""When each action of a schedule runs, for given times of stages, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Schedule
from vescale_parallel._schedules.check import in_order, results_of


@dataclass(frozen=True)
class StageTimes:
    """What one stage takes for one microbatch, in any unit of time; and what it keeps.

    Attributes:
        forward: of a forward.
        inputs: of the gradients of inputs; a whole backward takes `inputs + weights`.
        weights: of the gradients of weights.
        kept: what a microbatch keeps from its forward to its backward, in any unit of memory.
        kept_for_weights: the part of it that gradients of weights need after those of inputs.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    kept: float = 1.0
    kept_for_weights: float = 1.0

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
        spans: for each rank its actions in time.
        seconds: when the last one ends, in the unit of the stages' times.
        peaks: for each rank the most that it keeps at once, in the unit of the stages' memory.
        messages: how many activations and gradients pass from rank to rank.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...] = field(repr=False)
    seconds: float
    peaks: tuple[float, ...]
    messages: int

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, how long it computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait, from 0 to 1."""
        return 1 - sum(self.busy) / (self.seconds * len(self.spans)) if self.seconds else 0.0

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
        PlanError: there are not as many times as stages, or ranks wait for each other.
    """
    stages = schedule.stages
    each = (times,) * stages if isinstance(times, StageTimes) else tuple(times)
    if len(each) != stages:
        raise PlanError(f"schedule {schedule.name}: {len(each)} times for {stages} stages.")
    place, microbatches = schedule.stage_ranks, schedule.microbatches
    free = [0.0] * len(schedule.ranks)
    ended = [0.0] * (results_of(schedule) + 1)  # the last stands for what needs nothing
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    messages = 0
    for rank, (action, own, other, result) in in_order(schedule):
        start = max(free[rank], ended[own])
        if other >= 0:
            far = place[other // microbatches % stages] != rank
            messages += far
            start = max(start, ended[other] + send * far)
        free[rank] = ended[result] = end = start + each[action.stage].of(action)
        spans[rank].append(Span(action, start, end))
    peaks = tuple(_peak(row, each) for row in spans)
    found = tuple(map(tuple, spans))
    return Timeline(schedule, found, max(free, default=0.0), peaks, messages)


def _peak(row: Sequence[Span], times: Sequence[StageTimes]) -> float:
    """The most that a rank keeps: its actions follow each other, so their order is enough."""
    kept = most = 0.0
    for action, _, _ in row:
        at_start, at_end = times[action.stage].keeps(action)
        kept += at_start
        most = max(most, kept)
        kept += at_end
    return most
