"""What `explain` and `strict` are told of a call on its way through dispatch.

While anybody observes, every call takes the slow path, which reports here what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.forked import refuse_if_forked
from vescale_dtensor._tensor.observers import Observer, observers


class CallObserver(Observer):
    """Is told what happens to a call, in the order in which it happens.

    Attributes:
        compares_plain: whether plain operands are to be compared over ranks: always, never, or
            None for no opinion.
    """

    compares_plain: bool | None = None

    def on_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """A call has arrived. Every one of these is followed by `on_return`."""

    def on_return(self, result: Any) -> None:
        """The call is over; None where it failed."""

    def on_plan(self, call: OpCall, plan: OpPlan) -> None:
        """A rule's plan is about to run."""

    def on_fallback(self, call: OpCall) -> None:
        """There is no plan: the operands are about to be replicated."""


def _call_observers() -> list[CallObserver]:
    # A copy: a watcher may leave while it is being told something.
    return [observer for observer in observers if isinstance(observer, CallObserver)]


def plain_comparison_mode() -> CallObserver | None:
    """The last one that has an opinion on plain operands: what the innermost `strict` opened."""
    return next((w for w in reversed(_call_observers()) if w.compares_plain is not None), None)


def observed(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(func, args, kwargs)`, seen by everybody who watches."""
    refuse_if_forked(function_name(func))
    observers_now = _call_observers()
    for observer in observers_now:
        observer.on_call(func, args, kwargs)
    result = None
    try:
        result = run(func, args, kwargs)
        return result
    finally:
        for observer in observers_now:
            observer.on_return(result)


def notify_plan(call: OpCall, plan: OpPlan) -> None:
    """Tell everybody that a plan is about to run."""
    for observer in _call_observers():
        observer.on_plan(call, plan)


def notify_fallback(call: OpCall) -> None:
    """Tell everybody that operands are about to be replicated."""
    for observer in _call_observers():
        observer.on_fallback(call)
