"""The list of observers, and what they are told of redistributions.

`_dispatch/observers.py` adds what they are told of calls. While nobody observes, each place that
reports something costs one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vescale_dtensor._redistribute.plan import RedistributionPlan


class Observer:
    """Is told what happens to tensors; by default it does nothing about it."""

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        """A tensor is about to change its layout."""


# Not a context variable: those do not reach the threads in which a backward may run.
observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let it see everything in this process until the block ends."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def notify_redistribution(plan: RedistributionPlan, *, backward: bool = False) -> None:
    """Tell everybody of a redistribution."""
    for observer in tuple(observers):
        observer.on_redistribute(plan, backward)
