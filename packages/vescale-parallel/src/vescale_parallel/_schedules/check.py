"""Whether a schedule computes everything once, and ends.

Results are numbered, and what actions need and give is worked out for a whole row of a rank at
once: schedules of hundreds of ranks have millions of actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Kind, Schedule

Numbers = NDArray[np.int64]


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that leaves out something, does it twice, or in an order that never ends.

    Raises:
        PlanError: with the first action that is wrong, or, of a deadlock, what each rank waits for.
    """
    columns = [columns_of(row) for row in schedule.ranks]
    _check_actions(schedule, columns)
    for _ in in_order(schedule, [needs_of(schedule, one) for one in columns]):
        pass


ORDER: Final[tuple[Kind, ...]] = ("F", "I", "W", "B")
"""How columns number kinds."""

_CODES: Final = {kind: code for code, kind in enumerate(ORDER)}


class Columns(NamedTuple):
    """The actions of one rank as columns.

    Attributes:
        kinds: each as its place in `ORDER`.
        stages: of each action.
        microbatches: of each action.
    """

    kinds: Numbers
    stages: Numbers
    microbatches: Numbers


def columns_of(row: tuple[Action, ...]) -> Columns:
    """Take the actions of a rank apart."""
    if not row:
        return Columns(*(np.zeros(0, np.int64) for _ in range(3)))
    kinds, stages, microbatches = zip(*row, strict=True)
    codes = [_CODES[kind] for kind in kinds]
    return Columns(*(np.array(one, np.int64) for one in (codes, stages, microbatches)))


def _check_actions(schedule: Schedule, columns: list[Columns]) -> None:
    stages, microbatches = schedule.stages, schedule.microbatches
    places = np.array(schedule.stage_ranks)
    # Of each result how often it is made; whole backwards make both halves.
    made = np.zeros(results_of(schedule), np.int64)
    for rank, one in enumerate(columns):
        there = (one.stages >= 0) & (one.stages < stages)
        there &= (one.microbatches >= 0) & (one.microbatches < microbatches)
        # Only where the stage exists: its number is an index here.
        there[there] = places[one.stages[there]] == rank
        if not there.all():
            action = schedule.ranks[rank][int(there.argmin())]
            raise PlanError(
                f"schedule {schedule.name}: {action} is on rank {rank}, where there is no "
                f"such stage and microbatch ({stages} stages, {microbatches} microbatches)."
            )
        each = one.stages * microbatches + one.microbatches
        for code, results in ((0, (0,)), (1, (1,)), (2, (2,)), (3, (1, 2))):
            for result in results:
                numbers = result * stages * microbatches + each[one.kinds == code]
                made += np.bincount(numbers, minlength=len(made))
    wrong = np.flatnonzero(made != 1)
    if len(wrong):
        # Without the kind of the result: what is told are all actions of this stage and microbatch.
        stage, microbatch = divmod(int(wrong[0]) % (stages * microbatches), microbatches)
        row = schedule.ranks[schedule.stage_ranks[stage]]
        found = ", ".join(a.kind for a in row if a[1:] == (stage, microbatch))
        raise PlanError(
            f"schedule {schedule.name}: stage {stage} has {found or 'nothing'} for microbatch "
            f"{microbatch}; it needs F and B, or F, I and W, each once."
        )


class Needs(NamedTuple):
    """What the actions of one rank wait for, and what they give, as numbers of results.

    Lists of numbers of Python: they are read one by one, for which arrays are slow.

    Attributes:
        own: the result of the same stage that each needs, or -1.
        other: the result of the stage before (of a forward) or after, or -1.
        results: what each gives. Whole backwards and those of inputs give the same.
    """

    own: list[int]
    other: list[int]
    results: list[int]


def needs_of(schedule: Schedule, columns: Columns) -> Needs:
    """Return what the actions of a rank need and give."""
    stages, microbatches = schedule.stages, schedule.microbatches
    backward, weights, last = stages * microbatches, 2 * stages * microbatches, stages - 1
    kinds, stage, _ = columns
    here = stage * microbatches + columns.microbatches
    is_forward, is_weights = kinds == 0, kinds == 2
    own = np.where(is_forward, -1, np.where(is_weights, backward + here, here))
    before = np.where(stage > 0, here - microbatches, -1)
    behind = np.where(stage < last, backward + here + microbatches, -1)
    other = np.where(is_forward, before, np.where(is_weights, -1, behind))
    results = here + np.where(is_forward, 0, np.where(is_weights, weights, backward))
    return Needs(own.tolist(), other.tolist(), results.tolist())


def results_of(schedule: Schedule) -> int:
    """How many results `needs_of` numbers."""
    return 3 * schedule.stages * schedule.microbatches


def in_order(schedule: Schedule, needs: list[Needs]) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, and from which of their actions to which they can go on, until all are done.

    All that these need has been yielded before, or comes before them among them.

    Raises:
        PlanError: ranks wait for each other.
    """
    done = bytearray(results_of(schedule) + 1)
    done[-1] = 1  # what needs nothing needs number -1
    # By the result that they wait for: the ranks that cannot go on.
    waiting: dict[int, list[int]] = {}
    at = [0] * len(needs)
    ready = list(range(len(needs)))
    while ready:
        rank = ready.pop()
        own, other, results = needs[rank]
        start = now = at[rank]
        # As far as it can go at once: a rank is looked at again only when what it waits for is
        # done, so that all in all each action is looked at about once.
        while now < len(results):
            if not (done[own[now]] and done[other[now]]):
                # One of them is enough: when it is done, the rank looks again.
                missing = other[now] if done[own[now]] else own[now]
                waiting.setdefault(missing, []).append(rank)
                break
            result = results[now]
            done[result] = 1
            if result in waiting:
                ready += waiting.pop(result)
            now += 1
        at[rank] = now
        if now > start:
            yield rank, start, now
    stuck = [(rank, n) for rank, n in enumerate(at) if n < len(needs[rank].results)]
    if stuck:
        raise PlanError(_deadlock(schedule, needs, stuck, done))


def _deadlock(
    schedule: Schedule, needs: list[Needs], stuck: list[tuple[int, int]], done: bytearray
) -> str:
    def told(number: int) -> str:
        kind, place = divmod(number, schedule.stages * schedule.microbatches)
        stage, microbatch = divmod(place, schedule.microbatches)
        return str(Action("FIW"[kind], stage, microbatch))  # type: ignore[arg-type]

    lines = "; ".join(
        f"rank {rank} at {schedule.ranks[rank][at]} waits for "
        + ", ".join(told(n) for n in (needs[rank].own[at], needs[rank].other[at]) if not done[n])
        for rank, at in stuck[:8]
    )
    return f"schedule {schedule.name} never ends: {lines}."
