"""Observers of calls on their way through dispatch: the interface of `explain` and `strict`.

While there is an observer, every call takes the slow path, which reports here what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.plan import OpPlan, function_name
from vescale_dtensor._tensor.fork_check import refuse_if_forked
from vescale_dtensor._tensor.observers import Observer, observers


class CallObserver(Observer):
    """Base class of observers; its methods are called in the order in which things happen."""

    def on_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Called when a call arrives, with its arguments. `on_return` follows, also on an error."""

    def on_return(self, result: Any) -> None:
        """Called with the result of the call; None if it failed."""

    def on_plan(self, call: OpCall, plan: OpPlan) -> None:
        """Called before a plan runs."""

    def on_fallback(self, call: OpCall) -> None:
        """Called before operands are replicated for lack of a plan."""


def _call_observers() -> list[CallObserver]:
    # A copy, since an observer may remove itself while it is called.
    return [observer for observer in observers if isinstance(observer, CallObserver)]


def plain_comparison_mode() -> CallObserver | None:
    """The innermost observer that decides whether plain operands are compared; None: none does."""
    return next((w for w in reversed(_call_observers()) if w.compares_plain is not None), None)


def observed(
    run: Callable[..., Any], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """`run(func, args, kwargs)` between `on_call` and `on_return` of every observer."""
    refuse_if_forked(function_name(func))
    # The same observers for both, or one that comes in between would get an end without beginning.
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
    """Call `on_plan` of every observer."""
    for observer in _call_observers():
        observer.on_plan(call, plan)


def notify_fallback(call: OpCall) -> None:
    """Call `on_fallback` of every observer."""
    for observer in _call_observers():
        observer.on_fallback(call)
