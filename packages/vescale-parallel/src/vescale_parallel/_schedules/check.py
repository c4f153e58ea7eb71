"""Checks that a schedule computes everything once, and ends.

Results are numbered, and what actions need and give is worked out for a whole row of a rank at
once: schedules of hundreds of ranks have millions of actions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Kind, Schedule, action_of

Numbers = NDArray[np.int64]


def check_schedule(schedule: Schedule, *, buffers: int | None = None) -> None:
    """Refuse a schedule that leaves out something, does it twice, or in an order that never ends.

    Args:
        schedule: the schedule.
        buffers: how many microbatches each stage has room for: a microbatch takes it from its
            forward until its whole backward, or that of weights, is done. None: there is no bound.

    Raises:
        PlanError: with the first action that is wrong, or, of a deadlock, what each rank waits for.
    """
    # First: tables of results have a place for each stage and microbatch, and one wrong number in a
    # file can make them larger than memory.
    require_enough(schedule, 2)
    columns = columns_of(schedule)
    _check_actions(schedule, columns)
    for _ in in_order(schedule, needs_of(schedule, columns)):
        pass
    if buffers is not None:
        _check_buffers(schedule, columns, buffers)


ORDER: Final[tuple[Kind, ...]] = ("F", "I", "W", "B")
"""How columns number kinds."""

_CODES: Final = {kind: code for code, kind in enumerate(ORDER)}


class Columns(NamedTuple):
    """The actions of all ranks as columns, those of the first rank first.

    Attributes:
        kinds: each as its place in `ORDER`.
        stages: of each action.
        microbatches: of each action.
        ranks: that does each.
        ends: for each rank, how many actions it and those before it have.
    """

    kinds: Numbers
    stages: Numbers
    microbatches: Numbers
    ranks: Numbers
    ends: Numbers

    def by_rank(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """A column cut into that of each rank."""
        return np.split(values, self.ends[:-1])


def columns_of(schedule: Schedule) -> Columns:
    """Take the actions of all ranks apart.

    Raises:
        PlanError: something among them is no action.
    """
    lengths = [len(row) for row in schedule.ranks]
    each = list(chain.from_iterable(schedule.ranks))
    try:
        # One pass for each column: `zip(*each)` would make an iterator for each action.
        codes = np.array([_CODES[kind] for kind, _, _ in each], np.int64)
        # By `index`, since numpy would cut fractions off.
        stages = np.array([index(stage) for _, stage, _ in each], np.int64)
        microbatches = np.array([index(microbatch) for _, _, microbatch in each], np.int64)
    # Only a schedule that was put together by hand has such: `action_of` says which it is.
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        deque(map(action_of, each), maxlen=0)
        raise PlanError(
            f"schedule {schedule.name}: its actions are no `Action`s: make it by schedule_of."
        ) from error
    ranks = np.repeat(np.arange(len(lengths)), lengths)
    return Columns(codes, stages, microbatches, ranks, np.cumsum(lengths, dtype=np.int64))


def require_enough(schedule: Schedule, least: int) -> None:
    """Refuse a schedule with fewer actions than that for each stage and microbatch.

    Raises:
        PlanError: with the first stage and microbatch that has fewer.
    """
    if sum(map(len, schedule.ranks)) >= least * schedule.stages * schedule.microbatches:
        return
    had = Counter(action[1:] for row in schedule.ranks for action in map(action_of, row))
    pairs = ((s, m) for s in range(schedule.stages) for m in range(schedule.microbatches))
    raise _not_once(schedule, *next(pair for pair in pairs if had[pair] < least))


def _not_once(schedule: Schedule, stage: int, microbatch: int) -> PlanError:
    row = schedule.ranks[schedule.stage_ranks[stage]]
    found = ", ".join(a.kind for a in row if a[1:] == (stage, microbatch))
    return PlanError(
        f"schedule {schedule.name}: stage {stage} has {found or 'nothing'} for microbatch "
        f"{microbatch}; it needs F and B, or F, I and W, each once."
    )


def _check_actions(schedule: Schedule, columns: Columns) -> None:
    stages, microbatches = schedule.stages, schedule.microbatches
    kinds, stage, microbatch, ranks, _ = columns
    places = np.array(schedule.stage_ranks)
    there = (stage >= 0) & (stage < stages) & (microbatch >= 0) & (microbatch < microbatches)
    # Only where the stage exists: its number is an index here.
    there[there] = places[stage[there]] == ranks[there]
    if not there.all():
        first = int(np.argmin(there))
        action = Action(ORDER[kinds[first]], int(stage[first]), int(microbatch[first]))
        raise PlanError(
            f"schedule {schedule.name}: {action} is on rank {ranks[first]}, where there is no "
            f"such stage and microbatch ({stages} stages, {microbatches} microbatches)."
        )
    # Of each result how often it is made; whole backwards make both halves.
    numbers = stage * microbatches + microbatch
    every = stages * microbatches
    parts = ((0, 0), (1, 1), (2, 2), (3, 1), (3, 2))
    made = np.concatenate([numbers[kinds == code] + result * every for code, result in parts])
    wrong = np.flatnonzero(np.bincount(made, minlength=results_of(schedule)) != 1)
    if len(wrong):
        # Without the kind of the result: what is told are all actions of this stage and microbatch.
        raise _not_once(schedule, *divmod(int(wrong[0]) % every, microbatches))


def _check_buffers(schedule: Schedule, columns: Columns, buffers: int) -> None:
    """Refuse a schedule by which a stage has more microbatches at once than it has room for."""
    # The order of a rank is enough: its actions follow each other. With the halves of a backward
    # the second ends what is kept.
    change = np.array([1, 0, -1, -1])[columns.kinds]
    order = np.lexsort((np.arange(len(change)), columns.stages))
    # Each stage ends with none, so that what those before it add up to is none as well.
    kept = change[order].cumsum()
    over = order[kept > buffers]
    if len(over):
        first = int(np.min(over))
        stage = int(columns.stages[first])
        most = int(kept[columns.stages[order] == stage].max())
        action = Action(ORDER[columns.kinds[first]], stage, int(columns.microbatches[first]))
        raise PlanError(
            f"schedule {schedule.name}: stage {stage} keeps {most} microbatches at once, and has "
            f"buffers for {buffers}: {action} on rank {columns.ranks[first]} is the first that "
            "finds none."
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


def needs_of(schedule: Schedule, columns: Columns) -> list[Needs]:
    """Return what the actions of each rank need and give."""
    stages, microbatches = schedule.stages, schedule.microbatches
    backward, weights, last = stages * microbatches, 2 * stages * microbatches, stages - 1
    kinds, stage = columns.kinds, columns.stages
    here = stage * microbatches + columns.microbatches
    is_forward, is_weights = kinds == 0, kinds == 2
    own = np.where(is_forward, -1, np.where(is_weights, backward + here, here))
    before = np.where(stage > 0, here - microbatches, -1)
    behind = np.where(stage < last, backward + here + microbatches, -1)
    other = np.where(is_forward, before, np.where(is_weights, -1, behind))
    results = here + np.where(is_forward, 0, np.where(is_weights, weights, backward))
    cut = (columns.by_rank(one) for one in (own, other, results))
    return [Needs(*(one.tolist() for one in row)) for row in zip(*cut, strict=True)]


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
