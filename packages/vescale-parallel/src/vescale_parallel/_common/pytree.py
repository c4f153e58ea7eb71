"""Apply a function to every tensor in nested arguments or results of a module."""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any, *, copies: bool = False) -> Any:
    """Return the same nesting of tuples, lists and dicts with every tensor replaced.

    Named tuples stay named; dicts, their subclasses and what behaves like one (model outputs and
    batches of Hugging Face among them) are copied and their items set, so they keep their type and
    attributes. Other values stay as they are, and so does a container in which nothing is replaced:
    a list to which a module appends its auxiliary loss has to be the caller's own.

    Args:
        function: gives what takes the place of a tensor.
        value: the nesting.
        copies: whether every container is a new one.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(function, one, copies=copies) for one in value]
        if not copies and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # A named tuple is made of its fields one by one; other tuples, `torch.Size` and torch's
        # named results among them, of an iterable.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {key: map_tensors(function, value[key], copies=copies) for key in list(value)}
        if not copies and all(new is value[key] for key, new in changed.items()):
            return value
        # Not `type(value)(...)`: model outputs are dataclasses too, whose constructor takes fields.
        mapped = copy.copy(value)
        for key, new in changed.items():
            mapped[key] = new
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
