"""Apply a function to every tensor in nested arguments or results of a module."""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the same nesting of tuples, lists and dicts with every tensor replaced.

    Named tuples stay named; dicts, their subclasses and what behaves like one (model outputs and
    batches of Hugging Face among them) are copied and their items set, so they keep their type and
    attributes. Other values stay as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # A named tuple is made of its fields one by one, other tuples of an iterable.
        return type(value)(*(map_tensors(function, one) for one in value))
    # `torch.Size` and torch's named results are tuples made of an iterable as well.
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, one) for one in value)
    if isinstance(value, MutableMapping):
        # Not `type(value)(...)`: model outputs are dataclasses too, whose constructor takes fields.
        mapped = copy.copy(value)
        for key in list(value):
            mapped[key] = map_tensors(function, value[key])
        return mapped
    return value


def named_tensors_within(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return every tensor in a nesting, by a readable path as `['tokens'][0]`.

    Sees what `map_tensors` replaces: lists, tuples and dicts, and what is like them.
    """
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, MutableMapping):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, one in items:
        found |= named_tensors_within(one, f"{path}[{key!r}]")
    return found
