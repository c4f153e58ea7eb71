"""Schedules that are found by a rule: what is most urgent next, under a bound on memory.

The rule of "Zero bubble pipeline parallelism" (arXiv 2401.10241): gradients of inputs first, since
the rank before waits for them; a forward if what is kept allows one more; else gradients of
weights, for which nobody waits, so that they fill what would be a pause.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from vescale_parallel._errors import PlanError
from vescale_parallel._schedules.actions import Action, Schedule, check_counts, looped
from vescale_parallel._schedules.timeline import EQUAL, StageTimes


def zb_greedy(
    ranks: int, microbatches: int, times: StageTimes | Sequence[StageTimes] = EQUAL
) -> Schedule:
    """Split backwards in the order that the rule finds for these times, within the memory of 1F1B.

    Args:
        ranks: number of ranks, each with one stage.
        microbatches: number of microbatches.
        times: of the stages, by which actions are chosen.

    Raises:
        PlanError: a count is not positive, or there are not as many times as stages.
    """
    check_counts("zb-greedy", ranks, microbatches)
    each = (times,) * ranks if isinstance(times, StageTimes) else tuple(times)
    if len(each) != ranks:
        raise PlanError(f"schedule zb-greedy: {len(each)} times for {ranks} stages.")
    # As much as 1F1B keeps on its first rank.
    rows = _greedy_order(ranks, microbatches, each, ranks)
    return Schedule("zb-greedy", rows, looped(ranks, 1), microbatches)


class _Rank:
    """What one rank can do next, and what it has done."""

    def __init__(self) -> None:
        self.forwards: deque[int] = deque()  # whose activations are there
        self.inputs: deque[int] = deque()  # whose gradients are there
        self.weights: deque[int] = deque()  # whose gradients of inputs are done
        self.kept = 0
        self.busy = False
        self.row: list[Action] = []


def _greedy_order(
    ranks: int, microbatches: int, times: Sequence[StageTimes], most: int
) -> tuple[tuple[Action, ...], ...]:
    """Run ranks side by side, each doing what is most urgent when it is free."""
    states = [_Rank() for _ in range(ranks)]
    states[0].forwards.extend(range(microbatches))
    events: list[tuple[float, int, Action]] = []

    def begin(rank: int, now: float) -> None:
        state = states[rank]
        action = None if state.busy else _next(state, rank, most)
        if action is None:
            return
        state.busy = True
        state.row.append(action)
        heapq.heappush(events, (now + times[rank].of(action), rank, action))

    # Only the first rank has something to do at the beginning.
    begin(0, 0.0)
    while events:
        now = events[0][0]
        touched = set()
        # All that ends now, before anybody chooses.
        while events and events[0][0] == now:
            _, rank, action = heapq.heappop(events)
            touched |= _end(states, rank, action)
        # Sorted, as sets have no order: every process makes this schedule by itself, and all have
        # to make the same.
        for rank in sorted(touched):
            begin(rank, now)
    return tuple(tuple(state.row) for state in states)


def _next(state: _Rank, rank: int, most: int) -> Action | None:
    if state.inputs:
        return Action("I", rank, state.inputs.popleft())
    if state.forwards and state.kept < most:
        state.kept += 1
        return Action("F", rank, state.forwards.popleft())
    return Action("W", rank, state.weights.popleft()) if state.weights else None


def _end(states: Sequence[_Rank], rank: int, action: Action) -> set[int]:
    """Take in that an action has ended; returns the ranks that may have something to do."""
    state, last = states[rank], len(states) - 1
    state.busy = False
    touched = {rank}
    if action.kind == "F":
        receiver = state.inputs if rank == last else states[rank + 1].forwards
        receiver.append(action.microbatch)
        touched.add(min(rank + 1, last))
    elif action.kind == "I":
        state.weights.append(action.microbatch)
        if rank:
            states[rank - 1].inputs.append(action.microbatch)
            touched.add(rank - 1)
    else:
        state.kept -= 1
    return touched
