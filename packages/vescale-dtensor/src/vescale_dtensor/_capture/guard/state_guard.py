"""The guard of a program on Python state: that every place holds what it held when recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from vescale_dtensor._capture.guard.equality import exactly, same
from vescale_dtensor._capture.guard.kinds import values_of
from vescale_dtensor._capture.guard.named_state import (
    Contents,
    NamedState,
    Namespace,
    SingleValue,
    function_state,
    in_cell,
)
from vescale_dtensor._capture.guard.places import MISSING, Origin

_backwards: Any = reversed


class StateGuard:
    """What a program's places hold. Asked at every call.

    The common answer is found by comparing identities, in a few calls of C code over flat lists.
    Where an object is another, `same` decides: equal constants are taken in.

    Args:
        state: what the code of the program names.
    """

    def __init__(self, state: NamedState) -> None:
        # What failed last: where a value takes turns, many programs fail by the same place.
        self._suspect: _Row | Contents | SingleValue | None = None
        rows = [_Row(space, state) for space in state.spaces]
        self._rows = [row for row in rows if row.names or row.absent or row.owner is not None]
        self._contents = state.contents
        self._looks = [look for look in state.looks if look.counts]
        self._keep()

    def _keep(self) -> None:
        """Prepare the fast comparison with what all places hold now."""
        owned = [row for row in self._rows if row.owner is not None]
        self._owners = [row.owner for row in owned]
        self._types = [type(owner) for owner in self._owners]
        # How many names there are, and the last one, show that a name was added.
        spaces = [row.mapping for row in owned]
        containers = [c.container for c in self._contents]
        self._containers = [*containers, *(c.container.values() for c in self._contents
                                           if c.values is not None)]  # fmt: skip
        self._counted = [*spaces, *containers]
        self._lengths = list(map(len, self._counted))
        self._ended: list[Any] = [space for space in spaces if space]
        self._ends = [next(_backwards(space)) for space in self._ended]
        self._absent = [(row.mapping.keys(), row.absent) for row in self._rows if row.absent]
        self._getters = [(row.getter, row.mapping) for row in self._rows if row.names]
        looks: list[Any] = [place.look for place in self._looks]
        # Asked in C and flattened: as one tuple, made anew each time, it would never be identical.
        self._functions = [look.args[0] for look in looks if look.func is function_state]
        # An empty cell raises where it is read directly, so empty ones are asked by `in_cell`.
        full = {id(k) for k in looks if k.func is in_cell and k() is not MISSING}
        self._cells = [look.args[0] for look in looks if id(look) in full]
        others = [k for k in looks if k.func is not function_state and id(k) not in full]
        self._others = list(map(_direct, others))
        # These references keep the values alive: a freed object's address could come again as
        # another's, and `is` would not tell.
        self._values = list(self._now())

    def _now(self) -> Iterator[Any]:
        """What all places hold now, in the order of `_values`."""
        return chain(
            chain.from_iterable([get(mapping) for get, mapping in self._getters]),
            chain.from_iterable(self._containers),
            chain.from_iterable(map(function_state, self._functions)),
            [cell.cell_contents for cell in self._cells],
            [look() for look in self._others],
        )

    def holds(self) -> bool:
        """Whether every place holds what it held."""
        if self._suspect is not None and _difference(self._suspect) is not None:
            return False
        return self._is_identical() or self.difference() is None

    def _is_identical(self) -> bool:
        """Whether every place holds the very objects that it held; False proves nothing."""
        # No `==` on what places hold: comparing with a tensor would be an op, and 1 == True.
        # Lengths first: `map` stops at the shorter list, and values are compared by position.
        try:
            return (
                list(map(len, self._counted)) == self._lengths
                and list(map(next, map(_backwards, self._ended))) == self._ends
                and all(map(is_, map(type, self._owners), self._types))
                and all([keys.isdisjoint(names) for keys, names in self._absent])
                and all(map(is_, self._now(), self._values))
            )
        except (KeyError, ValueError, AttributeError, RuntimeError):
            return False  # a name, or what a cell or slot held, is gone; a dict grows meanwhile

    def difference(self) -> Origin | None:
        """The first place that holds something else; None if there is none, which is kept."""
        # Slower, and decisive: `_is_identical` is also False where nothing differs, for equal
        # constants that are other objects, or names that no code reads.
        places: list[_Row | Contents | SingleValue] = [*self._rows, *self._contents, *self._looks]
        for place in places:
            found = _difference(place)
            if found is not None:
                self._suspect = place
                return found
        return None


class _Row:
    """The names of one namespace that count, with their values."""

    __slots__ = ("absent", "attributes", "cls", "getter", "mapping", "names", "owner", "place",
                 "values")  # fmt: skip

    def __init__(self, place: Namespace, state: NamedState) -> None:
        self.place, self.mapping, self.owner = place, place.mapping, place.owner
        self.cls = type(place.owner)
        self.attributes = state.attributes - place.excluded - state.unguarded
        self.names = tuple(name for name in tuple(place.mapping) if name in place.followed)
        self.values = [place.mapping[name] for name in self.names]
        # One name twice: of one name alone `itemgetter` gives no tuple but the value.
        asked = self.names * 2 if len(self.names) == 1 else self.names
        self.getter: Any = itemgetter(*asked) if asked else None
        # Of globals: one that is defined later hides a builtin.
        self.absent = (place.names or set()) - place.mapping.keys()

    def difference(self) -> Origin | None:
        """The first name that has another value."""
        place = self.place
        if type(self.owner) is not self.cls:
            return Origin(place.origin, ".__class__", "__class__")
        for index, name in enumerate(self.names):
            now = self.mapping.get(name, MISSING)
            if not same(now, self.values[index]):
                return place.at(name)
        # A name that was not there: it may hide an attribute of the class, or a builtin.
        new = self.absent if self.owner is None else self.attributes - set(self.names)
        return next((place.at(name) for name in new if name in self.mapping), None)


def _direct(look: Any) -> Any:
    """A slot that is asked in C."""
    slot, value = look.args if len(look.args) == 2 else (None, None)
    # An empty slot raises AttributeError, which `_is_identical` takes for a difference.
    return look if slot is None or look() is MISSING else partial(slot.__get__, value, type(value))


def _difference(place: _Row | Contents | SingleValue) -> Origin | None:
    """What of a place is another than it was."""
    if isinstance(place, _Row):
        return place.difference()
    if isinstance(place, Contents):
        return None if same_contents(place) else different_item(place)
    if not same(place.look(), place.was):
        return place.origin or Origin(None, "a value", "")
    return None


def different_item(place: Contents) -> Origin:
    """The item of a container that is another than it was; the container, if there are more."""
    whole = place.origin or Origin(None, f"a {type(place.container).__name__}", "")
    now = tuple(place.container)
    if len(now) != len(place.items) or isinstance(place.container, set):
        return whole
    keys: Sequence[Any] = now if place.values is not None else range(len(now))
    was = place.items if place.values is None else place.values
    current = now if place.values is None else tuple(place.container.values())
    different = [k for k, a, b in zip(keys, current, was, strict=True) if not same(a, b)]
    if not different or not isinstance(different[0], str | int | float):
        return whole
    return Origin(whole, f"[{different[0]!r}]", "")


def same_contents(place: Contents) -> bool:
    """Whether a container has equal contents."""
    now, was = tuple(place.container), place.items
    if len(now) != len(was):
        return False
    if isinstance(place.container, set):
        # In order, which loops over equal sets may differ in; their own `==` takes 1 for True.
        return list(map(exactly, now)) == list(map(exactly, was))
    values = values_of(place.container) or ()
    return all(map(same, now, was)) and all(map(same, values, place.values or ()))
