"""Tensors in nested arguments and results: found, named, replaced.

All three look into tuples, lists, dicts and what behaves like one, data classes and slices. Those
of other packages that walk through arguments use these, so that what one of them sees, all do.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from operator import is_
from typing import Any

from torch import Tensor, nn

__all__ = [
    "Copied",
    "field_names",
    "map_tensors",
    "named_tensors_within",
    "tensors_within",
    "with_fields",
]

Copied = list[tuple[Any, Any]]
"""Containers that can be written to, each with the one that takes its place."""


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors of a nesting, in order; one that is there twice, twice.

    An object of a data class is looked into once: those may refer back to what holds them.
    """
    # A loop and not a recursion: recordings look into the arguments of every call.
    found: list[Tensor] = []
    left = [value]
    objects: dict[int, Any] = {}
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            left.extend(reversed(one))
        elif isinstance(one, dict):
            left.extend(reversed(one.values()))
        # Most arguments are plain ones: asking whether they behave like a dict takes longer than
        # all else here.
        elif one is not None and type(one) not in _PLAIN and id(one) not in objects:
            # Kept, so that no other object gets the same id meanwhile.
            objects[id(one)] = one
            left.extend(reversed([item for _, item in _items(one)]))
    return found


_PLAIN = frozenset({bool, int, float, str})


def named_tensors_within(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return every tensor in a nesting, by a readable path as `['tokens'][0]`."""
    if isinstance(value, Tensor):
        return {path: value}
    found: dict[str, Tensor] = {}
    _name(value, path, found)
    return found


def _name(value: Any, path: str, found: dict[str, Tensor]) -> None:
    for key, one in _items(value):
        if isinstance(one, Tensor):
            found[f"{path}[{key!r}]"] = one
        elif one is not None and type(one) not in _PLAIN and (type(one) is not dict or one):
            _name(one, f"{path}[{key!r}]", found)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, each with the word or number by which it does; nothing of others."""
    # No generator, and the usual ones first: arguments of every call of a module are looked into.
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, dict | MutableMapping):
        # Keys first: whoever is given what is in it may write to it.
        return [(key, value[key]) for key in list(value)]
    if isinstance(value, slice):  # x[i:j], where i and j may be tensors of no dims
        return (("start", value.start), ("stop", value.stop), ("step", value.step))
    return [(name, getattr(value, name)) for name in field_names(value)]


def map_tensors(
    function: Callable[[Tensor], Any],
    value: Any,
    *,
    copies: bool = False,
    copied: Copied | None = None,
) -> Any:
    """Return the same nesting with every tensor replaced.

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
    if value is None or type(value) in _PLAIN:
        return value
    if type(value) is dict and not value and not copies:
        return value  # as most calls have no arguments by name
    if type(value) is tuple or type(value) is list:
        # The usual ones, without a call for each of their items.
        items = [
            function(one)
            if isinstance(one, Tensor)
            else (one if one is None or type(one) in _PLAIN else mapped_of(one))
            for one in value
        ]
        if not copies and all(map(is_, items, value)):
            return value
        return noted(items) if type(value) is list else tuple(items)
    given = list(_items(value))
    changed = [(key, mapped_of(one)) for key, one in given]
    if not copies and all([new is old for (_, new), (_, old) in zip(changed, given, strict=True)]):
        return value
    if isinstance(value, tuple | list | slice):
        made = _sequence_like(value, [one for _, one in changed])
        return noted(made) if isinstance(value, list) else made
    if isinstance(value, MutableMapping):
        # Not `type(value)(...)`: model outputs are dataclasses too, whose constructor takes fields.
        mapped = copy.copy(value)
        for key, new in changed:
            mapped[key] = new
        return noted(mapped)
    return noted(with_fields(value, dict(changed))) if changed else value


def _sequence_like(value: Any, items: list[Any]) -> Any:
    # A named tuple and a slice are made of their items one by one; lists and other tuples,
    # `torch.Size` and torch's named results among them, of an iterable.
    one_by_one = isinstance(value, slice) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )
    return type(value)(*items) if one_by_one else type(value)(items)


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
