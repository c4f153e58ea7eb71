"""The guard of a program on Python state: that every place holds what it held when recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from gc import get_referents
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

from vescale_dtensor._capture.equality import exactly, lasting, same
from vescale_dtensor._capture.kinds import namespace_of
from vescale_dtensor._capture.libraries import has_only_imported
from vescale_dtensor._capture.looks import Steady, referents
from vescale_dtensor._capture.module_guards import module_flags, module_tables
from vescale_dtensor._capture.places import (
    COPYING,
    MISSING,
    Contents,
    Count,
    Look,
    Namespace,
    Origin,
    Place,
    function_state,
    in_cell,
    in_slot,
)
from vescale_dtensor._capture.reads import StateReads
from vescale_dtensor._capture.walk import is_implicit

_namespace = attrgetter("__dict__")


class StateGuard:
    """What a program's places hold. Asked at every call.

    The common answer is found by comparing identities, in a few calls of C code over flat lists.
    Where an object is another, `same` decides: equal constants are taken in.

    Args:
        reads: what the recording met; it has no changes of its own.
    """

    def __init__(self, reads: StateReads) -> None:
        self._suspect: _Row | Contents | Look | None = None
        self._rows: list[_Row] = []
        self._contents: list[Contents] = []
        self._looks: list[Look] = []
        for place in reads.places:
            if isinstance(place, Namespace):
                row = _Row(place, reads)
                if not row.is_idle():
                    self._rows.append(row)
            elif isinstance(place, Contents):
                self._contents.append(place)
            else:
                self._looks.append(place)
        self._keep()

    def _keep(self) -> None:
        """Prepare the fast comparison with what all places hold now."""
        rows = self._rows
        owned = [row for row in rows if row.owner is not None]
        self._owners = [row.owner for row in owned]
        self._types = [type(owner) for owner in self._owners]
        # Of other classes, `obj.__dict__` may be code of the user's, which a guard must not run.
        plain = [row for row in owned if _reads_plainly(type(row.owner))]
        self._plain = [row.owner for row in plain]
        self._dicts = [row.mapping for row in plain]
        odd = [row for row in owned if not _reads_plainly(type(row.owner))]
        self._odd = [row.owner for row in odd]
        self._odd_dicts = [row.mapping for row in odd]
        # A name that is missing is looked up in the class, by __getattr__, until it is there.
        exact = [row.mapping for row in rows if row.absent is None]
        self._keyed, self._keys = exact, list(map(tuple, exact))
        # Views of keys are live: what is asked at each call is the namespace as it is then.
        self._absent = [(row.mapping.keys(), row.absent) for row in rows if row.absent]
        self._getters = [(row.getter, row.mapping) for row in rows if row.names]
        containers = [c.container for c in self._contents]
        containers += [c.values() for c in containers if isinstance(c, Mapping)]
        self._containers, self._lengths = containers, list(map(len, containers))
        looks: list[Any] = [place.look for place in self._looks]
        # Numbers above 256 are new objects each time, so these are never identical.
        self._counted = [look.args[0] for look in looks if _asks(look, len)]
        self._counts = list(map(len, self._counted))
        # Asked in C and flattened: as one tuple, made anew each time, it would never be identical.
        self._functions = [look.args[0] for look in looks if _asks(look, function_state)]
        # An empty cell raises where it is read directly, so empty ones are asked by `in_cell`.
        full = {id(k) for k in looks if _asks(k, in_cell) and k() is not MISSING}
        self._cells = [look.args[0] for look in looks if id(look) in full]
        # Aliases in annotations, by the thousand in some models: what they refer to is asked in C.
        referring = [k for k in looks if type(k) is Steady and _asks(k.look, referents)]
        self._referring = [k.look.args[0] for k in referring]
        self._reach = list(map(len, map(get_referents, self._referring)))
        full |= set(map(id, referring))
        apart = {id(k) for k in looks if _asks(k, function_state) or _asks(k, len)} | full
        asked = [k for k in looks if id(k) not in apart]
        # What is copied each time it is asked for is never identical: bytes of buffers and arrays.
        self._copies = [k for k in asked if any(_asks(k, function) for function in COPYING)]
        self._copied = [look() for look in self._copies]
        copies = set(map(id, self._copies))
        self._asked = [_direct(look) for look in asked if id(look) not in copies]
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
            chain.from_iterable(map(get_referents, self._referring)),
            [look() for look in self._asked],
        )

    def holds(self) -> bool:
        """Whether every place holds what it held."""
        # Where a value takes turns, many programs fail by the same place: that is asked first.
        if self._suspect is not None and _difference(self._suspect) is not None:
            return False
        return self._is_identical() or self.difference() is None

    def _is_identical(self) -> bool:
        """Whether every place holds the very objects that it held; False proves nothing."""
        # No `==` on what places hold: comparing with a tensor would be an op, and 1 == True.
        # Keys and lengths first: `map` stops at the shorter list, and values are compared by
        # position, so one more item here and one less there would shift or hide the others.
        try:
            return (
                list(map(tuple, self._keyed)) == self._keys
                and list(map(len, self._containers)) == self._lengths
                and list(map(len, self._counted)) == self._counts
                and list(map(len, map(get_referents, self._referring))) == self._reach
                and all(map(is_, map(type, self._owners), self._types))
                and all(map(is_, map(_namespace, self._plain), self._dicts))
                and all(map(is_, map(namespace_of, self._odd), self._odd_dicts))
                and [look() for look in self._copies] == self._copied
                and all([keys.isdisjoint(names) for keys, names in self._absent])
                and all(map(is_, self._now(), self._values))
            )
        except (KeyError, ValueError, AttributeError, RuntimeError):
            return False  # a name, or what a cell or slot held, is gone; a dict grows meanwhile

    def difference(self) -> Origin | None:
        """The first place that holds something else; None if there is none, which is kept."""
        # Slower, and decisive: `_is_identical` is also False where nothing differs, for equal
        # constants that are other objects, or names that no code reads.
        places: list[_Row | Contents | Look] = [*self._rows, *self._contents, *self._looks]
        for place in places:
            found = _difference(place)
            if found is not None:
                self._suspect = place
                return found
        # Else some place holds what is equal now and may be changed: it is asked at every call.
        if all(map(_is_taken_in, places)):
            self._keep()
        return None


class _Row:
    """The names of one namespace that matter, with their values."""

    __slots__ = (
        *("absent", "cls", "getter", "mapping", "names", "owner", "place", "relevant", "values"),
    )

    def __init__(self, place: Namespace, reads: StateReads) -> None:
        self.place, self.mapping, self.owner = place, place.mapping, place.owner
        self.cls = type(place.owner)
        self.relevant = relevant = names_that_matter(place, reads)
        # A copy of the keys: another thread may add some.
        self.names = tuple(name for name in tuple(place.mapping) if relevant(name))
        self.values = [place.mapping[name] for name in self.names]
        # One name twice: of one name alone `itemgetter` gives no tuple but the value.
        asked = self.names * 2 if len(self.names) == 1 else self.names
        self.getter: Any = itemgetter(*asked) if asked else None
        self.absent: set[str] | None = None
        if place.names is not None:
            # Of globals, absent names count: one that is defined later hides a builtin.
            self.absent = place.names - place.mapping.keys()
        elif place.owner is None and type(place.mapping) is dict and not reads.any_attribute:
            # Of a tensor, a function, a Python module: others do not stand in for what is missing,
            # which raises. Whether any code goes on then matters, not which: it may be the caller.
            missing = reads.attributes if reads.goes_on else set()
            self.absent = set(filter(relevant, missing - place.mapping.keys()))
        # Guards are made of what places hold now: own changes are none, or equal containers.
        place.was.clear()  # of what no code reads, nothing is kept alive

    def is_idle(self) -> bool:
        """Whether nothing can come of it: no name is read, and none would be missed."""
        return not self.names and self.absent is not None and not self.absent

    def difference(self) -> Origin | None:
        """The first name that has another value."""
        place = self.place
        # `obj.__dict__ = other` leaves the old namespace as it was.
        if self.owner is not None and namespace_of(self.owner) is not self.mapping:
            return Origin(place.origin, ".__dict__", "__dict__")
        if type(self.owner) is not self.cls:
            return Origin(place.origin, ".__class__", "__class__")
        for index, name in enumerate(self.names):
            now = self.mapping.get(name, MISSING)
            if not same(now, self.values[index]):
                return place.at(name)
            # An equal constant that is another object is taken in, and is identical the next time.
            if lasting(self.values[index], now):
                self.values[index] = now
        # A name that was not there: it may hide an attribute of the class, or a builtin.
        for name in self.mapping.keys() - set(self.names):
            if self.relevant(name):
                return place.at(name)
        return None


def names_that_matter(place: Namespace, reads: StateReads) -> Callable[[str], bool]:
    """Tells whether code may read a name in a namespace."""
    names, excluded, unguarded = place.names, place.excluded, reads.unguarded
    if names is not None:
        return names.__contains__
    attributes, any_attribute = frozenset(reads.attributes), reads.any_attribute
    if not any_attribute and type(place.mapping) is dict and not is_implicit(place, ""):
        # In C, for the many objects and modules in whose namespaces nothing is implicit.
        return (attributes - excluded - unguarded).__contains__

    def matters(name: str) -> bool:
        if name in excluded or name in unguarded:
            return False
        return any_attribute or name in attributes or is_implicit(place, name)

    return matters


def _asks(look: Any, function: Any) -> bool:
    """Whether a place is asked by one of the functions for which there is a faster way."""
    return type(look) is partial and look.func is function


def _direct(look: Any) -> Any:
    """A place that is asked in C, if it can be."""
    if not _asks(look, in_slot) or look() is MISSING:
        return look
    slot, value = look.args
    # An empty slot raises AttributeError, which `_is_identical` takes for a difference.
    return partial(slot.__get__, value, type(value))


def _reads_plainly(cls: type) -> bool:
    """Whether asking an instance for its namespace runs no code of its class."""
    getter: Any = cls.__getattribute__
    return getter in (object.__getattribute__, nn.Module.__getattribute__)


def _difference(place: _Row | Contents | Look) -> Origin | None:
    """What of a place is another than it was; takes in equal values if nothing is."""
    if isinstance(place, _Row):
        return place.difference()
    if isinstance(place, Contents):
        return None if _same_contents(place) else _different_item(place)
    now = place.look()
    if isinstance(place, Count) and now != place.was:
        (space,) = place.look.args  # type: ignore[attr-defined]  # of a partial
        if has_only_imported(space, place.names):
            place.was, place.names = now, frozenset(space)
    if not same(now, place.was):
        return place.origin or Origin(None, "a value", "")
    if lasting(place.was, now):
        place.was = now
    return None


def _is_taken_in(place: _Row | Contents | Look) -> bool:
    """Whether a place, whose values are the same, holds the very values that are compared with."""
    if isinstance(place, _Row):
        now = [place.mapping.get(name, MISSING) for name in place.names]
        return all(map(is_, now, place.values))
    if isinstance(place, Contents):
        values = place.container.values() if place.values is not None else ()
        return all(map(is_, place.container, place.items)) and all(
            map(is_, values, place.values or ())
        )
    return lasting(place.was, place.look())


def _different_item(place: Contents) -> Origin:
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


def _same_contents(place: Contents) -> bool:
    """Whether a container has equal contents; takes them in if so."""
    now, was = tuple(place.container), place.items
    if len(now) != len(was):
        return False
    if isinstance(place.container, set):
        # In order, which loops over equal sets may differ in; their own `==` takes 1 for True.
        if list(map(exactly, now)) != list(map(exactly, was)):
            return False
    elif not all(map(same, now, was)):
        return False
    if place.values is not None:
        values = tuple(place.container.values())
        if not all(map(same, values, place.values)):
            return False
        if all(map(lasting, place.values, values)):
            place.values = values
    if isinstance(place.container, set) or all(map(lasting, was, now)):
        place.items = now
    return True


# --- what the function itself changes


def own_changes(reads: StateReads) -> list[Origin]:
    """The places that hold something else than when the recording met them.

    A container that was replaced by an equal one is no change: the new one is met in its place.
    """
    # At the end of the run, by what each place held before any code could write it. A namespace
    # that has an equal container in place of another is no change, so namespaces are compared
    # first, which finds out what was replaced.
    comparison = _Comparison(reads)
    found, gone = [], set()
    # The list is complete before it is used: `replaced` is, too, only then.
    for origin, container in list(comparison.changed_places()):
        # A list that was replaced may have been written before. It matters if anything else from
        # outside still refers to it.
        if id(container) in comparison.replaced and not comparison.is_held(container):
            gone.add(id(container))  # what it holds does not matter any more
        else:
            found.append(origin)
    pairs = zip(reads.modules, reads.flags, reads.tables, strict=True)
    for module, was, tables in pairs:
        # `ModuleGuard` is made after the run, so it would take such a change for the state to
        # expect.
        if module_flags(module) != was or not all(map(is_, module_tables(module), tables)):
            title = f"the mode, or the hooks, of a {type(module).__name__}"
            found.append(Origin(None, title, "training"))
    # Guards of what is gone would keep it alive, and fail or hold for nothing.
    reads.places = [
        p for p in reads.places if not (isinstance(p, Contents) and id(p.container) in gone)
    ]
    # After the places are cleaned up, since this adds places. What the new containers hold is met
    # as it is now, which is equal to what it was.
    reads.start(comparison.successors)
    return found


class _Comparison:
    """Compares the places of a recording with what they held when they were met."""

    def __init__(self, reads: StateReads) -> None:
        self._reads = reads
        # Ids are unambiguous: every place holds its container.
        self._was = {id(p.container): p for p in reads.places if isinstance(p, Contents)}
        self.replaced: set[int] = set()
        self.successors: list[tuple[Any, Origin | None]] = []

    def is_held(self, container: Any) -> bool:
        """Whether any place holds a container now."""
        return any(v is container for place in self._reads.places for v in _values_in(place))

    def changed_places(self) -> Iterator[tuple[Origin, Any]]:
        """The places that differ, each with its container if it is one. Namespaces come first."""
        for place in list(self._reads.places):
            if isinstance(place, Namespace):
                yield from ((place.at(name), None) for name in self._changed_names(place))
            elif isinstance(place, Look) and not self._alike(place.look(), place.was, place.origin):
                yield place.origin or Origin(None, "a value", ""), None
        for place in [*self._reads.places, *self._reads.parts]:
            if isinstance(place, Contents) and not _same_contents(place):
                yield _different_item(place), place.container

    def _changed_names(self, place: Namespace) -> Iterator[str]:
        """The names of a namespace that hold another value than when it was met."""
        matters = names_that_matter(place, self._reads)
        for name in place.was.keys() | place.mapping.keys():
            now, was = place.mapping.get(name, MISSING), place.was.get(name, MISSING)
            # Names are judged by all code that has run by now, so one is seen whichever function
            # wrote it.
            if now is not was and matters(name) and not self._alike(now, was, place.at(name)):
                yield name

    def _alike(self, now: Any, was: Any, origin: Origin | None) -> bool:
        """Whether a value is what it was, or a new container of the same contents."""
        if same(now, was):
            return True
        # What the old container holds now may be newer, so it is compared as it was when it was
        # met.
        place = self._was.get(id(was))
        if place is None or type(now) is not type(was):
            return False
        values = tuple(now.values()) if isinstance(now, Mapping) else None
        if len(now) != len(place.items) or not all(map(same, now, place.items)):
            return False
        pairs = zip(values or (), place.values or (), strict=True)
        if not all(self._alike(new, old, origin) for new, old in pairs):
            return False
        # Functions that rebuild a dict of options in each call would otherwise never be recorded.
        self.replaced.add(id(was))
        self.successors.append((now, origin))
        return True


def _values_in(place: Place) -> Iterable[Any]:
    """What a place holds now."""
    if isinstance(place, Namespace):
        return tuple(place.mapping.values())
    if isinstance(place, Contents):
        found = place.container
        return tuple(found.values() if isinstance(found, Mapping) else found)
    return (place.look(),)
