"""What `explain` and `strict` see of a call on its way through dispatch.

While somebody watches, every call takes the slow path, which tells here what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._planning.op_call import Call
from vescale_dtensor._planning.plan import Plan
from vescale_dtensor._tensor.observers import Watcher, watchers


class CallWatcher(Watcher):
    """Is told what happens to a call, in the order in which it happens.

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


def _present() -> list[CallWatcher]:
    # A copy: a watcher may leave while it is being told something.
    return [watcher for watcher in watchers if isinstance(watcher, CallWatcher)]


def innermost_mode() -> CallWatcher | None:
    """The last one that has an opinion on plain operands: what the innermost `strict` opened."""
    return next((w for w in reversed(_present()) if w.compares_plain is not None), None)


def watched(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(func, args, kwargs)`, seen by everybody who watches."""
    present = _present()
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
    """Tell everybody that a plan is about to run."""
    for watcher in _present():
        watcher.ruled(call, plan)


def tell_fallback(call: Call) -> None:
    """Tell everybody that operands are about to be replicated."""
    for watcher in _present():
        watcher.fell_back(call)
