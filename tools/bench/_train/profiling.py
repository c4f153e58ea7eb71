"""Profiles a step on one rank: time per op, per collective, and in Python."""

from __future__ import annotations

import cProfile
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

_COLLECTIVE = ("gloo:", "nccl:")
_OP = re.compile(r"(?!autograd::|_?c10d)\w+::\w+")
"""Kernels have a namespace; names without one are frames of Python, which may wait inside."""


@dataclass(frozen=True)
class Line:
    """One op or collective: how often in a step, and milliseconds of a step inside of it alone."""

    name: str
    count: float
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """The time of a step of one rank.

    Attributes:
        milliseconds: of one step, with the profiler's own cost.
        ops: local computation, by op, the longest first.
        collectives: from the start of each to its end, as the backend tells them; a synchronous
            one is waited for in full.
        calls: of Python and C functions in a step, counted in steps of their own. Other than times
            they do not depend on what else the machine does.
    """

    milliseconds: float
    ops: tuple[Line, ...]
    collectives: tuple[Line, ...]
    calls: float

    @property
    def between(self) -> float:
        """Milliseconds in neither: Python, autograd's engine, launching, hooks, dispatch."""
        inside = sum(line.milliseconds for line in (*self.ops, *self.collectives))
        return max(0.0, self.milliseconds - inside)


def profiled(step: Callable[[], object], steps: int) -> Profile:
    """The mean over some steps; every rank calls it, as a step is collective."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
    lines = [
        Line(one.key, one.count / steps, one.self_cpu_time_total / 1e3 / steps)
        for one in found.key_averages()
    ]
    lines.sort(key=lambda line: -line.milliseconds)
    return Profile(
        1e3 * seconds / steps,
        ops=tuple(line for line in lines if _OP.fullmatch(line.name)),
        collectives=tuple(line for line in lines if line.name.startswith(_COLLECTIVE)),
        calls=_calls(step, steps),
    )


def _calls(step: Callable[[], object], steps: int) -> float:
    """Calls of functions in a step; those that autograd's engine makes in this thread, too."""
    counter = cProfile.Profile()
    counter.enable()
    try:
        for _ in range(steps):
            step()
    finally:
        counter.disable()
    return sum(entry.callcount for entry in counter.getstats()) / steps
