"""Timings of very short calls, taken in turns so that drift of the machine hits all alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

from tools.bench import in_turn

_BATCH_SECONDS = 0.004
"""A batch is long against the clock's resolution, and short against the drift of the machine."""

_MOST_CALLS = 5000


def microseconds(calls: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median cost of one call of each: batches of many calls, every round one batch of each."""
    numbers = {name: _calls_per_batch(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in in_turn(calls, turn):
            _batch(calls[name], 1)  # after another's turn nothing is in the caches
            found[name].append(_batch(calls[name], numbers[name]))
    return {name: statistics.median(times) * 1e6 for name, times in found.items()}


def microseconds_once(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    known: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Median cost of calls that are made only once each, in turns: of what is new every time.

    Before each a `known` one of its kind is made, some times: others leave nothing in the caches.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for at, turn in enumerate(zip(*calls.values(), strict=True)):
        given = dict(zip(calls, turn, strict=True))
        for name in in_turn(calls, at):
            if known is not None:
                _batch(known[name], 20)
            found[name].append(_batch(given[name], 1))
    return {name: statistics.median(times) * 1e6 for name, times in found.items()}


def _calls_per_batch(call: Callable[[], object]) -> int:
    _batch(call, 3)  # plans, lazy imports, optimizer state
    return min(_MOST_CALLS, max(1, int(_BATCH_SECONDS / _batch(call, 5))))


def _batch(call: Callable[[], object], number: int) -> float:
    """Seconds per call, of this thread: others on the machine cost it little of that."""
    turns = repeat(None, number)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.thread_time()
        for _ in turns:
            call()
        return (time.thread_time() - start) / number
    finally:
        if collecting:
            gc.enable()
