"""Who watches, and what they are told of redistributions. `_dispatch/observers.py` has the calls.

While nobody watches, each place that tells something costs one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vescale_dtensor._redistribute.plan import RedistributionPlan


class Watcher:
    """Is told what happens to tensors; by default it does nothing about it."""

    def moves(self, plan: RedistributionPlan, backward: bool) -> None:
        """A tensor is about to change its layout."""


# Not a context variable: those do not reach the threads in which a backward may run.
watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let it see everything in this process until the block ends."""
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


def tell_move(plan: RedistributionPlan, *, backward: bool = False) -> None:
    """Tell everybody of a redistribution."""
    for watcher in tuple(watchers):
        watcher.moves(plan, backward)
