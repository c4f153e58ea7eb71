"""Apply a function to every tensor in nested arguments or results of a module."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor replaced; the rest as it is.

    Named tuples stay named; dict subclasses (model outputs of Hugging Face among them) are copied
    and their items set, so they keep their type and attributes.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A named tuple takes its fields one by one, other tuples take an iterable.
        return type(value)(*(map_tensors(function, one) for one in value))
    # `torch.Size` and torch's named results are tuples that take an iterable as well.
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, one) for one in value)
    if isinstance(value, dict):
        # Not `type(value)(...)`: model outputs are dataclasses too, whose constructor takes fields.
        mapped = copy.copy(value)
        for key in list(value):
            mapped[key] = map_tensors(function, value[key])
        return mapped
    return value


def named_tensors_within(value: Any, path: str = "") -> dict[str, Tensor]:
    """Every tensor in a nesting, by a readable path as `['tokens'][0]`.

    Sees what `map_tensors` replaces: lists, tuples and dicts, and their subclasses.
    """
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, one in items:
        found |= named_tensors_within(one, f"{path}[{key!r}]")
    return found
