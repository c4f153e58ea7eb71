"""Watching: what `explain` and `strict` see of a call on its way through dispatch.

While somebody watches, every call takes the long road (see `_fast`), which tells here what it does.
While nobody does, each of these places costs one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale_dtensor._planning.op_call import Call
    from vescale_dtensor._planning.plan import Plan
    from vescale_dtensor._redistribute.plan import RedistributionPlan


class Watcher:
    """What happens to a call, in the order in which it happens; by default nobody cares.

    Attributes:
        compares_plain: whether plain operands are to be compared over ranks: always, never, or
            None for no opinion.
    """

    compares_plain: bool | None = None

    def begins(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """A call has arrived. Every one of these is followed by `ends`."""

    def ends(self, result: Any) -> None:
        """The call is over; None where it failed."""

    def ruled(self, call: Call, plan: Plan) -> None:
        """A rule's plan is about to run."""

    def fell_back(self, call: Call) -> None:
        """There is no plan: the operands are about to be replicated."""

    def moves(self, plan: RedistributionPlan, backward: bool) -> None:
        """A tensor is about to change its layout."""


# Not a context variable: those do not reach the threads in which a backward may run.
watchers: list[Watcher] = []


def innermost_mode() -> Watcher | None:
    """The last one that has an opinion on plain operands: what the innermost `strict` opened."""
    return next((w for w in reversed(watchers) if w.compares_plain is not None), None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let it see every call in this process until the block ends."""
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)


def watched(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(func, args, kwargs)`, seen by everybody who watches."""
    present = tuple(watchers)
    for watcher in present:
        watcher.begins(func, args, kwargs)
    result = None
    try:
        result = run(func, args, kwargs)
        return result
    finally:
        for watcher in present:
            watcher.ends(result)


def tell_ruled(call: Call, plan: Plan) -> None:
    """Tell everybody."""
    for watcher in tuple(watchers):
        watcher.ruled(call, plan)


def tell_fallback(call: Call) -> None:
    """Tell everybody."""
    for watcher in tuple(watchers):
        watcher.fell_back(call)


def tell_move(plan: RedistributionPlan, *, backward: bool = False) -> None:
    """Tell everybody."""
    for watcher in tuple(watchers):
        watcher.moves(plan, backward)
