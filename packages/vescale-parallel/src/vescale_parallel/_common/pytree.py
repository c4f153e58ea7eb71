"""Apply a function to every tensor in nested arguments or results of a module."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

Copied = list[tuple[Any, Any]]
"""Containers that can be written to, each with the one that takes its place."""


def map_tensors(
    function: Callable[[Tensor], Tensor],
    value: Any,
    *,
    copies: bool = False,
    copied: Copied | None = None,
) -> Any:
    """Return the same nesting of tuples, lists and dicts with every tensor replaced.

    Named tuples stay named; dicts, data classes, their subclasses and what behaves like one (model
    outputs and batches of Hugging Face among them) are copied and their items set, so they keep
    their type and attributes. Other values stay as they are, and so does a container in which
    nothing is replaced:
    a list to which a module appends its auxiliary loss has to be the caller's own.

    Args:
        function: gives what takes the place of a tensor.
        value: the nesting.
        copies: whether every container is a new one.
        copied: is given the lists, dicts and data classes that are new ones, the inner ones first.
    """

    def mapped_of(one: Any) -> Any:
        return map_tensors(function, one, copies=copies, copied=copied)

    def noted(new: Any) -> Any:
        if copied is not None:
            copied.append((value, new))
        return new

    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [mapped_of(one) for one in value]
        if not copies and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return noted(type(value)(items))
        # A named tuple is made of its fields one by one; other tuples, `torch.Size` and torch's
        # named results among them, of an iterable.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {key: mapped_of(value[key]) for key in list(value)}
        if not copies and all(new is value[key] for key, new in changed.items()):
            return value
        # Not `type(value)(...)`: model outputs are dataclasses too, whose constructor takes fields.
        mapped = copy.copy(value)
        for key, new in changed.items():
            mapped[key] = new
        return noted(mapped)
    names = field_names(value)
    if names:
        changed = {name: mapped_of(getattr(value, name)) for name in names}
        if not copies and all(new is getattr(value, name) for name, new in changed.items()):
            return value
        return noted(with_fields(value, changed))
    return value


def field_names(value: Any) -> list[str]:
    """Return the fields of an object of a data class that have a value; none of anything else."""
    # By the type, and cheaply: this is asked of all that a nesting holds.
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is None or isinstance(value, nn.Module):
        return []
    return [one.name for one in dataclasses.fields(value) if hasattr(value, one.name)]


def with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    """Return a copy of an object of a data class with other values of some fields."""
    mapped = copy.copy(value)
    for name, new in changed.items():
        # Past a frozen class's own, and past `__post_init__`, which has run once.
        object.__setattr__(mapped, name, new)
    return mapped


def named_tensors_within(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return every tensor in a nesting, by a readable path as `['tokens'][0]`.

    Sees what `map_tensors` replaces: lists, tuples, dicts, what is like them, and data classes.
    """
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, MutableMapping):
        items = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        items = [(name, getattr(value, name)) for name in field_names(value)]
    found: dict[str, Tensor] = {}
    for key, one in items:
        found |= named_tensors_within(one, f"{path}[{key!r}]")
    return found
