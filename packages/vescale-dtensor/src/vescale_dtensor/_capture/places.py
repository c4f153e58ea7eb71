"""Places that hold state: namespaces, contents of containers, slots, cells, and what is asked for.

A place remembers what it held when a recording first came by, before any code that the recording
watches could change it. From that follow the guards of the program and, at the end, what the
function itself has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import CellType
from typing import Any, NamedTuple

from vescale_dtensor._tensor.dtensor import DTensor

# An object of its own: None may be what a place holds.
MISSING: Any = object()
# Some are written at each use: if they counted as the user's state, no program would stand for a
# second call.
OF_TENSORS = frozenset({*DTensor.__annotations__, "_is_param"})
"""Attributes of tensors that are none of the user's."""


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


# Set by torch's compiler itself the first time that it runs; no result depends on them.
_OF_COMPILERS = frozenset({b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR"})


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


@dataclass(eq=False, slots=True)
class Count(Look):
    """How many names a library's namespace has.

    Attributes:
        names: which.
    """

    names: frozenset[str]


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


def in_slot(slot: Any, value: Any) -> Any:
    """What a slot of an object holds; MISSING if nothing."""
    try:
        return slot.__get__(value, type(value))
    except AttributeError:
        return MISSING


def environment(value: Any) -> Any:
    """All variables of the environment, but those by which compilers find their own files."""
    # As `os` keeps them, without decoding each. Sorted, since their order has no meaning.
    return tuple(sorted(one for one in value._data.items() if one[0] not in _OF_COMPILERS))


def in_array(value: Any) -> Any:
    """What distinguishes arrays: dtype, shape, values; strides and whether they can be written."""
    state = value.dtype.str, value.shape, value.tobytes(), value.strides, value.flags.num
    return (*state, value.dtype.names, getattr(value, "hardmask", None))


COPYING = (bytes, environment, in_array)
"""What makes a new object of constants, one type of each, whenever a place is asked."""
