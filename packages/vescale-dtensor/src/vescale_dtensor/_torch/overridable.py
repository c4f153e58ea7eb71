"""`@overridable`: lets a TorchFunctionMode intercept our own functions as single calls.

A `TorchFunctionMode` (capture, a profiler) sees every torch function, but neither custom autograd
nodes nor state kept in Python. A function with this decorator is passed to an active mode as one
call, like torch's own functions. That is how `capture` records it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.overrides import handle_torch_function, has_torch_function_unary

P = ParamSpec("P")
R = TypeVar("R")

# Decorated function -> the plain function, for callers that know that no mode is active.
_implementations: dict[Any, Any] = {}


def overridable(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch function modes see a module-level function as one call. Costs 0.1 us."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function_unary(None):  # asked of no tensor: only a mode answers
            result: R = handle_torch_function(wrapper, (), *args, **kwargs)
            return result
        return function(*args, **kwargs)

    _implementations[wrapper] = function
    return wrapper


def implementation_of(function: Callable[P, R]) -> Callable[P, R]:
    """Return the plain function, without the test for modes; other functions as they are."""
    found: Callable[P, R] = _implementations.get(function, function)
    return found
