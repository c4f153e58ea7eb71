"""`op_support`: which torch functions have a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import get_overridable_functions, resolve_name

from vescale_dtensor._dispatch import known_handlers, known_rules
from vescale_dtensor._plan import function_name


def public_name(func: Callable[..., Any]) -> str:
    """Where users find a torch function: `torch.Tensor.add`, `torch.cdist`."""
    name: str = resolve_name(func) or function_name(func)
    return name.replace("torch.functional.", "torch.")


def op_support() -> dict[str, str]:
    """What answers for each function that torch lets be overridden.

    Returns:
        By the function's name (`torch.Tensor.add`): the family of its rule (`pointwise`); for
        what is no op on data but is handled, the kind of it (`metadata`, `refused`); or
        `fallback`: right, but its sharded operands are replicated first.
    """
    rules, handlers = known_rules(), known_handlers()
    found: dict[str, str] = {}
    for functions in get_overridable_functions().values():
        for func in functions:
            name = public_name(func)
            if func in handlers:
                found[name] = handlers[func].__module__.rpartition(".")[2]
            elif func in rules:
                found[name] = rules[func].name
            else:
                found[name] = "fallback"
    return found
