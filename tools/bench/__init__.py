"""What a benchmark of this workspace is made of.

A benchmark is a module with `measure() -> Iterable[Ratio]` whose docstring's first line is its
title: `tools/bench/NAME.py` or `packages/*/benchmarks/NAME.py`. `nox -s bench -- NAME` runs it.
Two more functions are optional: `parser()`, whose options become keywords of `measure`, and
`details() -> (text, data)`, which is printed and stored beside the ratios.
Timings are never compared across runs or machines: each is a ratio to a reference that was
measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ratio", "interleaved"]


@dataclass(frozen=True)
class Ratio:
    """One measured line: ours next to a reference, in the same unit and the same run."""

    name: str
    ours: float
    reference: float
    unit: str
    against: str  # what the reference is, in words
    goal: float | None = None  # the ratio that is aimed for
    more_is_better: bool = False  # whether the goal is to be reached, or not to be exceeded

    @property
    def ratio(self) -> float:
        """How many times the reference ours takes."""
        return self.ours / self.reference


def interleaved(
    ours: Callable[[], object], reference: Callable[[], object], *, repeat: int = 11
) -> tuple[float, float]:
    """Median seconds of each, timed in turns so that drift of the machine hits both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeat + 1):
        for function, found in zip((ours, reference), times, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first turn only warms up
                found.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])
