"""Runs the benchmarks of this workspace, each a module of its own.

A benchmark is a module with `measure() -> Iterable[Ratio]` whose docstring's first line is its
title: `tools/bench/NAME.py` or `packages/*/benchmarks/NAME.py`. `nox -s bench -- NAME` runs it.
Two more functions are optional: `parser()`, whose options become keywords of `measure`, and
`details() -> (text, data)`, which is printed and stored beside the ratios.
Timings are never compared across runs or machines: each is a ratio to a reference that was
measured in the same run, in turns (`in_turn`), each after a call of its own that is not timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Ratio", "in_turn"]


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


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """The names in the order of that turn: nobody always begins, or always follows the same one."""
    ordered = list(names)
    first = turn % len(ordered)
    return ordered[first:] + ordered[:first]
