"""`op_support`: lists which torch functions have a rule, and how they fared in the OpInfo sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from torch.overrides import get_overridable_functions, resolve_name

from vescale_dtensor._dispatch.registry import known_handlers, known_rules
from vescale_dtensor._planning.plan import function_name


class Support(str):
    """What answers for a torch function: the family of its rule, or `fallback`.

    Attributes:
        placements: kind of operand placements (`shard`, `partial`, or `both` in one call) -> how
            the calls of the OpInfo sweep ran: `native`, `fallback`, or `partly` (native in some
            layouts and forms). Empty for functions that the sweep does not call.
    """

    __slots__ = ("placements",)

    placements: Mapping[str, str]

    def __new__(cls, family: str, placements: Mapping[str, str]) -> Support:
        """Make a string with an attribute; str is immutable, so `__init__` would be too late."""
        made = super().__new__(cls, family)
        made.placements = MappingProxyType(dict(placements))
        return made

    @property
    def native(self) -> bool:
        """Whether there is a rule or handler; a rule need not hold in every layout."""
        return self != "fallback"


def public_name(func: Callable[..., Any]) -> str:
    """The name by which users call a torch function: `torch.Tensor.add`, `torch.block_diag`."""
    name: str = resolve_name(func) or function_name(func)
    return name.replace("torch.functional.", "torch.")


def op_support() -> dict[str, Support]:
    """What answers for each function that torch allows to be overridden.

    Returns: Name of the function (`torch.Tensor.add`) -> the family of its rule (`pointwise`); for
        a function with a handler, the module of that (`metadata`, `unsupported`); or `fallback`:
        right, but its sharded operands are replicated first. Each is a string, whose `placements`
        say how the function fared in the OpInfo sweep of this version; OPS.md shows the same.

    Examples:
        >>> op_support()["torch.tanh"]
        'pointwise'
    """
    rules, handlers, seen = known_rules(), known_handlers(), _seen()
    found: dict[str, Support] = {}
    for functions in get_overridable_functions().values():
        for func in functions:
            name = public_name(func)
            if func in handlers:
                family = handlers[func].__module__.rpartition(".")[2]
            else:
                family = rules[func].name if func in rules else "fallback"
            found[name] = Support(family, seen.get(name, {}))
    return found


@cache
def _seen() -> dict[str, dict[str, str]]:
    """The result of the sweep, which is part of the package: function -> placements -> result."""
    text = (files("vescale_dtensor") / "op_support.json").read_text()
    found: dict[str, dict[str, str]] = json.loads(text)
    return found
