"""Places that hold state: namespaces, contents of containers, slots, cells, and what is asked for.

A place remembers what it held when a recording first came by, before any code that the recording
watches could change it. From that follow the guards of the program and, at the end, what the
function itself has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import CellType, MethodType
from typing import Any, NamedTuple

import torch

# An object of its own: None may be what a place holds.
MISSING: Any = object()
# Some are written at each use: if they counted as the user's state, no program would stand for a
# second call.
_OF_DTENSORS = """
_use_aliases _leaf_gradient _grad_of _retained_grad _cached_redistribution _local_escaped
_retain_grad_hook _view_copy_of _stray_grad_guard _function_node _from_checkpoint
_is_param _local_tensor _spec _may_have_hidden_node
"""
OF_TENSORS = frozenset(_OF_DTENSORS.split())
"""Attributes of tensors that are none of the user's."""

# Immutable, and compared by value without code of the user's: exact types, no subclasses.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), range)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Origin(NamedTuple):
    """How code reaches a value: for messages.

    Attributes:
        parent: how it reaches what holds the value; None for what code names itself.
        text: the last part.
        name: the name in it, which `unguarded` may list.
    """

    parent: Origin | None
    text: str
    name: str

    def __str__(self) -> str:
        return f"{self.parent or ''}{self.text}"

    def names(self) -> Iterator[str]:
        """The names on the way, the last one first."""
        yield self.name
        if self.parent is not None:
            yield from self.parent.names()


@dataclass(eq=False, slots=True)
class Namespace:
    """Names with values: the `__dict__` of an object, class, module or function, or globals.

    Attributes:
        mapping: the namespace itself.
        was: what it held.
        origin: of it.
        owner: the object whose `__dict__` it is, if its class and `__dict__` may be replaced.
        names: the names that matter; None for all attributes that code names.
        excluded: names that are guarded elsewhere.
    """

    # Held strongly, as in the classes below: the walk knows objects by id.
    mapping: Mapping[str, Any]
    was: dict[str, Any]
    origin: Origin | None
    owner: Any = None
    names: set[str] | None = None
    excluded: frozenset[str] = frozenset()

    def at(self, name: str) -> Origin:
        """How code reaches a value in it."""
        if self.names is not None:
            return Origin(None, f"global {name}", name)
        return Origin(self.origin, f".{name}", name)


@dataclass(eq=False, slots=True)
class Contents:
    """All that a list, dict, set or deque contains.

    Attributes:
        container: itself.
        items: its items; of a dict, its keys.
        values: of a dict.
        origin: of it.
    """

    container: Any
    items: tuple[Any, ...]
    values: tuple[Any, ...] | None
    origin: Origin | None


@dataclass(eq=False, slots=True)
class Look:
    """Any other place: a cell, a slot, a weak reference, the values of an array.

    Attributes:
        look: gives what it holds now, or MISSING.
        was: what it held.
        origin: of it.
    """

    look: Callable[[], Any]
    was: Any
    origin: Origin | None


Place = Namespace | Contents | Look


def contents_of(container: Any, origin: Origin | None) -> Contents:
    """A container as it is now."""
    # Tuples, which hold the items: what is compared by identity later must not have been freed.
    values = tuple(container.values()) if isinstance(container, Mapping) else None
    return Contents(container, tuple(container), values, origin)


function_state: Callable[[Any], Any] = attrgetter("__code__", "__defaults__", "__kwdefaults__")
"""What of a function may be replaced."""


def in_cell(cell: CellType) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def same(one: Any, two: Any) -> bool:
    """Whether nothing can come of one value that does not come of the other.

    They are one object, or equal constants of one type. Runs no code of the user's.
    """
    # Most calls end here: parameters, modules and functions are the same objects each time.
    if one is two:
        return True
    kind = type(one)
    # 1 == True == 1.0, but code that branches on the type tells them apart.
    if kind is not type(two):
        return False
    if kind in (float, complex):
        return bool(repr(one) == repr(two))  # 0.0 == -0.0, and nan != nan
    if kind in _PLAIN or kind.__module__ == "numpy":
        # Any other type has an `==` that may be the user's, or an op on tensors.
        return (kind in _PLAIN and bool(one == two)) or _same_number(one, two)
    if isinstance(one, tuple):
        # Named tuples, too: that the types are the same has been seen.
        return len(one) == len(two) and all(map(same, one, two))
    return _same_parts(kind, one, two)


def _same_parts(kind: type, one: Any, two: Any) -> bool:
    """Whether slices, bound methods, partials and frozensets have the same parts."""
    if kind is slice:
        return same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    if kind is MethodType:
        # Python makes a bound method anew each time one is asked for.
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    if kind is partial:
        # By identity of what it calls, and with the order of the keywords, which `**kwargs` shows.
        named = tuple(one.keywords.items()), tuple(two.keywords.items())
        return one.func is two.func and same(one.args, two.args) and same(*named)
    if kind is frozenset and all(type(v) in _PLAIN for v in one | two):
        return bool(one == two)
    return False


def _same_number(one: Any, two: Any) -> bool:
    """Whether two numpy scalars are the same."""
    # By bytes: nan == nan, and 0.0 is not -0.0.
    return hasattr(one, "tobytes") and one.shape == () and bool(one.tobytes() == two.tobytes())
