"""The functions of a test file by their names, and the decorator that collects them."""

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def named_cases() -> tuple[dict[str, Function], Callable[[Function], Function]]:
    """Return a dict, and a decorator that puts a function into it under the function's name."""
    cases: dict[str, Function] = {}

    def case(function: Function) -> Function:
        cases[function.__name__] = function
        return function

    return cases, case
