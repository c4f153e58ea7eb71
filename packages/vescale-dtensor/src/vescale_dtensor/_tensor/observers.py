"""Keeps the list of observers, and calls them for redistributions.

`_dispatch/observers.py` adds what they are told of calls. While the list is empty, each place that
reports something costs one look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._redistribute.plan import RedistributionPlan
from vescale_dtensor._tensor.dtensor import DTensor


class Observer:
    """Base class of observers: called for events, does nothing by default.

    Attributes:
        compares_plain: whether to compare plain operands over ranks at every call; False: at none;
            None: as without this observer.
    """

    compares_plain: bool | None = None

    def on_redistribute(self, plan: RedistributionPlan, backward: bool) -> None:
        """Called before a tensor is redistributed, in forward or `backward`."""

    def on_to_local(self, tensor: DTensor) -> None:
        """Called when a program asks for a local tensor."""


# One list per process and not a context variable: these do not reach the threads in which torch may
# run a backward.
observers: list[Observer] = []


Watch = Callable[[DTensor, tuple[Placement, ...]], None]

# Apart from observers, for which every call takes the slow path.
operand_watches: list[Watch] = []


@contextmanager
def watch_operands(watch: Watch) -> Iterator[None]:
    """Call `watch(operand, placements)` before an op redistributes an operand without being asked.

    Of forwards in all threads of the process; calls keep their fast path. A `redistribute` of the
    program, and gradients, are not told.
    """
    operand_watches.append(watch)
    try:
        yield
    finally:
        operand_watches.remove(watch)


def notify_operand(operand: DTensor, placements: tuple[Placement, ...]) -> None:
    """Tell all watches of an operand that is about to be redistributed."""
    for watch in tuple(operand_watches):
        watch(operand, placements)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Add an observer of everything in this process until the block ends."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def compares_plain() -> bool | None:
    """What the innermost observer says that decides whether plain operands are compared."""
    said = (one.compares_plain for one in reversed(observers))
    return next((one for one in said if one is not None), None)


def notify_redistribution(plan: RedistributionPlan, *, backward: bool = False) -> None:
    """Tell all observers of a redistribution."""
    # A copy: an observer may remove itself while it is told.
    for observer in tuple(observers):
        observer.on_redistribute(plan, backward)


def notify_to_local(tensor: DTensor) -> None:
    """Tell all observers of a local tensor that is handed out."""
    for observer in tuple(observers):
        observer.on_to_local(tensor)
