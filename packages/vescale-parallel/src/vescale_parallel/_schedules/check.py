"""Whether a schedule computes everything once, and ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Schedule


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that leaves out something, does it twice, or in an order that never ends.

    Raises:
        PlanError: with the first action that is wrong, or, of a deadlock, what each rank waits for.
    """
    _check_actions(schedule)
    for _ in in_order(schedule):
        pass


def _check_actions(schedule: Schedule) -> None:
    stages, microbatches = schedule.stages, schedule.microbatches
    # Of each result how often it is made; whole backwards make both halves.
    made = [0] * results_of(schedule)
    weights = 2 * stages * microbatches
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            kind, stage, microbatch = action
            there = 0 <= stage < stages and 0 <= microbatch < microbatches
            if not there or schedule.stage_ranks[stage] != rank:
                raise PlanError(
                    f"schedule {schedule.name}: {action} is on rank {rank}, where there is no "
                    f"such stage and microbatch ({stages} stages, {microbatches} microbatches)."
                )
            here = stage * microbatches + microbatch
            made[_RESULTS[kind] * stages * microbatches + here] += 1
            if kind == "B":
                made[weights + here] += 1
    wrong = next((number for number, times in enumerate(made) if times != 1), None)
    if wrong is not None:
        stage, microbatch = divmod(wrong % (stages * microbatches), microbatches)
        row = schedule.ranks[schedule.stage_ranks[stage]]
        found = ", ".join(a.kind for a in row if a[1:] == (stage, microbatch))
        raise PlanError(
            f"schedule {schedule.name}: stage {stage} has {found or 'nothing'} for microbatch "
            f"{microbatch}; it needs F and B, or F, I and W, each once."
        )


_RESULTS: Final = {"F": 0, "B": 1, "I": 1, "W": 2}


class Step(NamedTuple):
    """An action, and what it waits for, as numbers of results.

    Attributes:
        action: the action.
        own: number of the result of the same stage that it needs, or -1.
        other: number of the result of the stage before (of a forward) or after, or -1.
        result: number of what it gives. Whole backwards and those of inputs give the same.
    """

    action: Action
    own: int
    other: int
    result: int


def steps_of(schedule: Schedule) -> list[list[Step]]:
    """The actions of each rank with what they wait for."""
    stages, microbatches = schedule.stages, schedule.microbatches
    backward, weights, last = stages * microbatches, 2 * stages * microbatches, stages - 1

    def step(action: Action) -> Step:
        kind, stage, microbatch = action
        here = stage * microbatches + microbatch
        if kind == "F":
            return Step(action, -1, here - microbatches if stage else -1, here)
        if kind == "W":
            return Step(action, backward + here, -1, weights + here)
        after = backward + here + microbatches if stage != last else -1
        return Step(action, here, after, backward + here)

    return [[step(action) for action in row] for row in schedule.ranks]


def results_of(schedule: Schedule) -> int:
    """How many results `steps_of` numbers."""
    return 3 * schedule.stages * schedule.microbatches


def in_order(schedule: Schedule) -> Iterator[tuple[int, Step]]:
    """Yield ranks and steps, each when all that it needs has been yielded.

    Raises:
        PlanError: ranks wait for each other.
    """
    rows = steps_of(schedule)
    done = bytearray(results_of(schedule) + 1)
    done[-1] = 1  # what needs nothing needs number -1
    # By the result that they wait for: the ranks that cannot go on.
    waiting: dict[int, list[int]] = {}
    at = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        for step in rows[rank][at[rank] :]:
            missing = step.own if not done[step.own] else step.other
            if not done[missing]:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            yield rank, step
            done[step.result] = 1
            if step.result in waiting:
                ready += waiting.pop(step.result)
    stuck = [(rank, rows[rank][n]) for rank, n in enumerate(at) if n < len(rows[rank])]
    if stuck:
        raise PlanError(_deadlock(schedule, stuck, done))


def _deadlock(schedule: Schedule, stuck: list[tuple[int, Step]], done: bytearray) -> str:
    def told(number: int) -> str:
        kind, place = divmod(number, schedule.stages * schedule.microbatches)
        stage, microbatch = divmod(place, schedule.microbatches)
        return str(Action("FIW"[kind], stage, microbatch))  # type: ignore[arg-type]

    lines = "; ".join(
        f"rank {rank} at {step.action} waits for "
        + ", ".join(told(n) for n in (step.own, step.other) if not done[n])
        for rank, step in stuck[:8]
    )
    return f"schedule {schedule.name} never ends: {lines}."
