"""What something from outside leads to: objects, their attributes and contents, as places.

`meet` takes in one value; `_walk` then follows what it leads to. Attributes that no code has named
so far wait: `StateReads` says which names the code that runs has.
"""

from __future__ import annotations

import abc
import decimal
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date
from functools import partial
from operator import methodcaller
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from vescale_dtensor._capture.code_files import (
    is_library_class,
    is_library_module,
)
from vescale_dtensor._capture.kinds import fields_in_c, kind_of_class, namespace_of, slots_of
from vescale_dtensor._capture.libraries import Libraries, Names, is_kept_there
from vescale_dtensor._capture.looks import Steady, decimals
from vescale_dtensor._capture.module_guards import HOOKS, PARTS, module_flags, module_tables
from vescale_dtensor._capture.outside import OutsideTensors
from vescale_dtensor._capture.places import (
    MISSING,
    OF_TENSORS,
    Contents,
    Count,
    Look,
    Namespace,
    Origin,
    Place,
    contents_of,
    in_array,
    in_slot,
)
from vescale_dtensor._capture.process_state import is_asked, is_unsteady, is_unsteady_method
from vescale_dtensor._capture.registrations import Registered
from vescale_dtensor._capture.standard_kinds import StandardKinds, has_more, name_called_by
from vescale_dtensor._tensor.dtensor import DTensor

# A bound on time and memory: beyond it the state counts as hidden, and the recording is refused.
_MOST = 200_000
# Guarded by `ModuleGuard`, which knows cheaper ways.
_OF_MODULES = frozenset({*HOOKS, *PARTS, "training"})
# What Python puts into the namespace of a class for itself: no special method among it, so nothing
# is called through it unnamed.
_OF_CLASSES = """
__module__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __firstlineno__ __qualname__
__static_attributes__ __match_args__ __abstractmethods__ _abc_impl __parameters__
__dataclass_params__ __orig_bases__ __slotnames__
"""
_NOT_IN_NAMESPACES = ("__name__", "__qualname__")
_UNREAD = frozenset(_OF_CLASSES.split())
_OF_LOGGERS = frozenset({*vars(logging.Logger("")), "root"})
_BIGGEST_ARRAY = 1 << 16


class Walk(StandardKinds):
    """The objects that a recording has met.

    Args:
        unguarded: names that are not followed.

    Attributes:
        tensors: those from outside.
        modules: the torch modules.
        flags: of each of them, its mode and how many hooks it had.
        tables: of each of them, the dicts of its parts and hooks.
        places: all places, in the order in which they were met.
        hidden: what was met whose state cannot be seen, with how code reaches it.
        attributes: all names of attributes in code that ran.
        any_attribute: whether it may use others.
        computes_names: whether it is code of the user's that may.
        goes_on: whether code of the user's may go on where an attribute is missing.
        unguarded: names that are not followed.
        parts: the parameters, buffers and submodules of modules, as they were.
        noted: whether any function in C was met whose calls matter.
        items: those of them that were met in containers.
    """

    def __init__(self, unguarded: frozenset[str]) -> None:
        self.tensors = OutsideTensors()
        self.modules: list[nn.Module] = []
        self.flags: list[tuple[Any, ...]] = []
        self.tables: list[tuple[Any, ...]] = []
        self.places: list[Place] = []
        self.hidden: list[tuple[Any, Origin | None]] = []
        self.attributes: set[str] = {"forward"}  # which modules call without a name of the user's
        self.any_attribute = False
        self.computes_names = False
        self.goes_on = False
        self.unguarded = unguarded
        self.parts: list[Contents] = []
        self.noted = False
        self.items: list[tuple[Any, Origin]] = []
        # Containers that `parts` and `ModuleGuard` guard, so that they are not compared twice.
        self._part_ids: set[int] = set()
        self._parts_were: dict[int, Contents] = {}
        self._known: dict[int, Any] = {}  # which keeps them alive, and their ids their own
        self._queue: list[tuple[Any, Origin | None]] = []
        # By id: objects that only weak references led to so far.
        self._weakly: dict[int, Origin | None] = {}
        # By the name of an attribute: the namespaces that hold one of that name which no code has
        # named so far. They are followed once some code names it.
        self._pending: defaultdict[str, list[Namespace]] = defaultdict(list)
        self._globals: dict[int, Namespace] = {}
        self._kept: list[tuple[Any, Origin]] = []  # objects in C that libraries hold
        # What code names there may be replaced, and is not followed.
        self._libraries = Libraries()
        # Its methods are called of arguments, which are tensors of a class of this package.
        for one in (Tensor, DTensor):
            self._guard_libraries(self._libraries.add(one))

    # --- names

    def _name_attributes(self, names: Iterable[str]) -> None:
        """Follow these attributes of all objects met so far, and of those met later."""
        new = set(names) - self.attributes - self.unguarded
        for name in new:
            self.attributes.add(name)
            for place in self._pending.pop(name, ()):
                self._follow(place, name)
        for value, origin in self._kept if new else ():
            self._ask_kept(value, origin, new)

    def _name_globals(
        self, space: Mapping[str, Any], names: Iterable[str], follow: bool = True
    ) -> None:
        """Follow these globals of a file; the first time, remember all that it has."""
        place = self._globals.get(id(space))
        if place is None:
            # All of it is copied at the first function of this file, since functions that run later
            # may name globals that earlier ones have written by then.
            place = Namespace(space, dict(space), None, names=set())
            self._globals[id(space)] = place
            self.places.append(place)
        assert place.names is not None
        for name in set(names) - place.names - self.unguarded:
            place.names.add(name)
            # Functions and constants of libraries are compared, and no more.
            value = place.was.get(name)
            self.noted |= is_asked(value)
            if follow or is_kept_there(value):
                self._follow(place, name)
            elif kind_of_class(type(value)) == "opaque" and id(value) not in self._known:
                self._add_kept(value, place.at(name))

    def _add_kept(self, value: Any, origin: Origin) -> None:
        """Remember an object in C that a library holds, of which code may ask attributes."""
        self._known[id(value)] = value
        self._kept.append((value, origin))
        self._ask_kept(value, origin, fields_in_c(value) if self.any_attribute else self.attributes)

    def _ask_kept(self, value: Any, origin: Origin, names: Iterable[str]) -> None:
        """Guard those attributes: `sys.stderr.encoding`. What they lead to is not followed."""
        for name in set(names) & set(fields_in_c(value)) - self.unguarded:
            look = partial(getattr, value, name, None)
            self.places.append(Look(look, look(), Origin(origin, f".{name}", name)))

    def _guard_libraries(self, found: Iterable[Names]) -> None:
        for space, names in found:
            self._name_globals(space, names, follow=False)

    def _reach_library(self, owner: Any) -> None:
        """Guard what users' code names of a library's class or Python module that it reaches."""
        self._guard_libraries(self._libraries.reach(owner))
        if self.computes_names:
            self._guard_any_names()

    def _guard_any_names(self) -> None:
        """Guard all that users' code may read of libraries by names that it computes."""
        for space, names in self._libraries.by_any_name():
            self._guard_libraries([(space, names)])
            # A name that is new there may be one that was missing.
            title = Origin(None, "a library", "")
            self.places.append(Count(partial(len, space), len(space), title, frozenset(space)))

    def _follow_all(self) -> None:
        """Follow all attributes of all objects met so far."""
        for value, origin in () if self.any_attribute else self._kept:
            self._ask_kept(value, origin, set(fields_in_c(value)) - self.attributes)
        self.any_attribute = True
        for name in list(self._pending):
            for place in self._pending.pop(name):
                self._follow(place, name)

    # --- what is met

    def meet(self, value: Any, origin: Origin | None) -> None:
        """Take in a value that code can get at; what it leads to follows in `_walk`."""
        if self._is_new(value):
            # Before it is visited, so that a cycle ends.
            self._known[id(value)] = value
            self._queue.append((value, origin))

    def _is_new(self, value: Any) -> bool:
        """Whether a value has state, and was not met yet."""
        if id(value) in self._known:
            if self._weakly:
                self._weakly.pop(id(value), None)  # no weak reference leads here
            return False
        return kind_of_class(type(value)) != "constant"

    def has_met(self, value: Any) -> bool:
        """Whether a value is from outside: constants are not."""
        return id(value) in self._known

    def meets_dates(self) -> bool:
        """Whether a class of dates was met."""
        return any(isinstance(one, type) and issubclass(one, date) for one in self._known.values())

    def met_of(self, classes: set[type]) -> list[Any]:
        """The objects of these very classes that were met."""
        return [value for value in self._known.values() if type(value) in classes]

    def _walk(self) -> None:
        """Take in everything that waits, and all that it leads to."""
        # A list in place of recursion: chains of objects may be longer than Python's stack. A
        # profile function is not called while it runs, so the walk does not watch itself.
        queue = self._queue
        while queue:
            value, origin = queue.pop()
            getattr(self, f"_meet_{kind_of_class(type(value))}")(value, origin)
            if len(self._known) > _MOST:
                queue.clear()
                self.hidden.append((f"more than {_MOST:,} objects", origin))

    def _meet_all(self, values: Iterable[Any], origin: Origin | None, text: str = "[{}]") -> None:
        """Take in the items of a sequence; `text` is how messages write their index."""
        for index, value in enumerate(values):
            if self._is_new(value):
                self.meet(value, Origin(origin, text.format(index), ""))

    def _add_namespace(self, place: Namespace) -> None:
        """Remember a namespace; follow the names that code has named, let the others wait."""
        self.places.append(place)
        # The copy, not the namespace: another thread may add names meanwhile.
        for name in place.was:
            if name in self.unguarded:
                continue
            if self.any_attribute or name in self.attributes or is_implicit(place, name):
                self._follow(place, name)
            else:
                self._pending[name].append(place)

    def _follow(self, place: Namespace, name: str) -> None:
        """Take in what a namespace held under a name."""
        # What it was, not what it is: the function may have written it since, unwatched.
        value = place.was.get(name, MISSING)
        if value is not MISSING and self._is_new(value):
            self.meet(value, place.at(name))

    def _look(self, look: Any, origin: Origin | None) -> Any:
        """Remember what a function gives, as a place, and take it in; returns it."""
        # Read once: what is compared later must be what was followed.
        found = look()
        self.places.append(Look(look, found, origin))
        if found is not MISSING:
            self.meet(found, origin)
        return found

    def only_weakly_met(self) -> list[tuple[Any, Origin | None]]:
        """What would die if guards did not hold it, which code that asks for it can tell."""
        found = self._weakly.items()
        return [(self._known[key], at) for key, at in found if key not in self._part_ids]

    # --- by kind

    def _meet_builtin(self, value: Any, origin: Origin | None) -> None:
        super()._meet_builtin(value, origin)
        if is_asked(value):
            self.noted = True
            if origin is not None and not origin.name:
                self.items.append((value, origin))

    def _meet_getter(self, value: Any, origin: Origin | None) -> None:
        super()._meet_getter(value, origin)
        # No profiler hears of what it calls.
        if type(value) is methodcaller and is_unsteady_method(name := name_called_by(value)):
            self.hidden.append((f"a call of {name}", origin))

    def _meet_weak(self, value: Any, origin: Origin | None) -> None:
        """Take in what a weak reference leads to, if it lives; the guard asks it again."""
        found = value()
        self.places.append(Look(value, found, origin))
        self._meet_more(value, origin)
        if found is None or id(found) in self._known:
            return
        self.meet(found, origin)
        # Classes and Python modules live on, and what counts as constant has nothing to compare.
        if kind_of_class(type(found)) not in ("class", "python_module", "constant"):
            self._weakly[id(found)] = origin

    def _meet_tensor(self, value: Any, origin: Origin | None) -> None:
        """Take in a tensor from outside, and what users have set on it."""
        self.tensors.add(value)
        if not is_library_class(type(value)):
            self.meet(type(value), origin)
        space = namespace_of(value)
        if space is not None:
            # What this package keeps on wrappers changes in each call and has guards of its own:
            # `FreeTensors`, `LeafUses`, and the key of the call.
            was = {k: v for k, v in space.items() if k not in OF_TENSORS}
            self._add_namespace(Namespace(space, was, origin, excluded=OF_TENSORS))

    def _meet_object(self, value: Any, origin: Origin | None) -> None:
        """Take in an object: its attributes, slots and class."""
        space = namespace_of(value)
        if space is None:
            # Without a `__dict__` there is no namespace to guard the class with.
            self._look(partial(type, value), Origin(origin, ".__class__", "__class__"))
        else:
            # With its owner: `obj.__dict__ = other` and `obj.__class__ = other` change neither
            # dict.
            self._add_namespace(Namespace(space, dict(space), origin, value))
        for name, slot in slots_of(type(value)).items():
            if name not in self.unguarded:
                self._look(partial(in_slot, slot, value), Origin(origin, f".{name}", name))
        self.meet(type(value), origin)

    def _meet_module(self, value: Any, origin: Origin | None) -> None:
        """Take in a torch module: its attributes, parts and hooks, each by its own guard."""
        self.modules.append(value)
        # Before the function can change them: `own_changes` compares with these.
        self.flags.append(module_flags(value))
        self.tables.append(module_tables(value))
        space = namespace_of(value)
        assert space is not None
        self._add_namespace(Namespace(space, dict(space), origin, value, excluded=_OF_MODULES))
        for name in PARTS:
            part = space.get(name)
            if part is None:
                continue
            # Also where it is empty: it may be filled later.
            held = contents_of(part, Origin(origin, f".{name}", name))
            self.parts.append(held)
            self._parts_were[id(part)] = held
            self._part_ids.add(id(part))
            if name == "_modules":  # only those that code names: others are not called
                self._add_namespace(Namespace(part, dict(part), origin, excluded=frozenset(part)))
            else:
                for key, tensor in part.items():
                    self.meet(tensor, Origin(origin, f".{key}", key))
        for name in HOOKS:
            hooks = space.get(name)
            if hooks is None:
                continue
            self._part_ids.add(id(hooks))
            # torch calls hooks, so no code of the user's names them.
            self._meet_all(hooks.values(), origin, " hook {}")
        self.meet(type(value), origin)

    def _meet_contents(self, value: Any, origin: Origin | None) -> None:
        """Take in a list, dict, set or deque, and all keys and values in it."""
        # Of parts what they were: a function may put others in their places while it runs.
        place = self._parts_were.get(id(value)) or contents_of(value, origin)
        if id(value) not in self._part_ids:  # which are guarded with their module
            self.places.append(place)
        # Everything in a container is followed, since an index or a loop names nothing.
        if place.values is None:
            self._meet_all(place.items, origin)
        else:
            for key, item in zip(place.items, place.values, strict=True):
                # No repr of other keys: a tensor's would be an op.
                if self._is_new(item):
                    text = f"[{key!r:.40}]" if _is_short(key) else "[...]"
                    self.meet(item, Origin(origin, text, ""))
                # An object may be a key, and code that loops over keys reads its attributes.
                self.meet(key, origin)
        if isinstance(value, defaultdict):
            factory = Origin(origin, ".default_factory", "default_factory")
            self._look(partial(getattr, value, "default_factory"), factory)
        if has_more(type(value)):
            self._meet_object(value, origin)

    def _meet_items(self, value: Any, origin: Origin | None) -> None:
        self._meet_all(value, origin)
        if has_more(type(value)):
            self._meet_object(value, origin)

    def _meet_partial(self, value: Any, origin: Origin | None) -> None:
        # No profiler hears of what a partial calls.
        if kind_of_class(type(value.func)) == "builtin" and is_unsteady(value.func):
            name = value.func.__name__
            self.hidden.append((f"a call of {name}", Origin(origin, f".{name}", name)))
        self.meet(value.func, origin)
        self._meet_all(value.args, origin)
        self.meet(value.keywords, origin)
        self._meet_named(value, origin)

    def _meet_named(self, value: Any, origin: Origin | None) -> None:
        """Take in what users have set on a constant, or on a partial."""
        if isinstance(value, BaseException):  # whose arguments are in no namespace
            for name in fields_in_c(value):
                self._look(partial(getattr, value, name, None), Origin(origin, f".{name}", name))
        self._meet_object(value, origin)

    def _meet_class(self, value: type, origin: Origin | None) -> None:
        """Take in the namespaces of a class and of its bases that users wrote."""
        if isinstance(value, abc.ABCMeta) and id(abc.ABCMeta) not in self._known:
            # `isinstance` asks what is registered, which counts here.
            self._look(Registered(), Origin(origin, ".register", "register"))
        self.meet(type(value), origin)  # whose attributes and special methods are the class's own
        for base in value.__mro__:
            if is_library_class(base):
                self._reach_library(base)
                continue
            if base is not value and id(base) in self._known:
                continue
            self._known[id(base)] = base
            title = Origin(None, f"class {base.__name__}", base.__name__)
            self._add_namespace(Namespace(vars(base), dict(vars(base)), title))
        if value is decimal.Decimal:
            self._look(Steady(decimals), Origin(origin, " in its context", ""))
        if not is_library_class(value):
            for name in _NOT_IN_NAMESPACES:
                self._look(partial(getattr, value, name), Origin(origin, f".{name}", name))
            # Assigning `__bases__` changes which class an attribute comes from, and no namespace.
            self._look(partial(getattr, value, "__mro__"), origin)

    def _meet_python_module(self, value: ModuleType, origin: Origin | None) -> None:
        """Take in the globals of a Python module, unless they count as constant."""
        if not is_library_module(value.__name__):
            title = Origin(None, f"module {value.__name__}", value.__name__)
            # One that answers for missing names: that a name is there later makes a difference.
            lazy = type(value) is not ModuleType or "__getattr__" in vars(value)
            owner = value if lazy else None
            if lazy:
                self._name_attributes(["__getattr__"])
                self.meet(type(value), title)
            self._add_namespace(Namespace(vars(value), dict(vars(value)), title, owner))
        else:
            if value is os:
                space = {"environ": os.environ}
                self._add_namespace(Namespace(space, dict(space), Origin(None, "os", "os")))
            if value is decimal:
                self._look(Steady(decimals), Origin(origin, " in its context", ""))
            self._reach_library(value)
            if type(value) is not ModuleType:  # of which classes have what the module seems to
                self.meet(type(value), origin)

    def _meet_logger(self, value: Any, origin: Origin | None) -> None:
        """Take in which messages a logger lets pass, and what users have set on it."""
        super()._meet_logger(value, origin)
        space = vars(value)
        # Not handlers and loggers above, which lead to streams.
        was = {name: one for name, one in space.items() if name not in _OF_LOGGERS}
        self._add_namespace(Namespace(space, was, origin, value, excluded=_OF_LOGGERS))
        self.meet(type(value), origin)

    def _meet_array(self, value: Any, origin: Origin | None) -> None:
        """Take in the values of a small numpy array."""
        # A guard copies and compares the values at each call. Objects in an array could be changed
        # without a change of their addresses, which are all that the bytes of it show.
        if value.nbytes > _BIGGEST_ARRAY or value.dtype.hasobject:
            self.hidden.append((value, origin))
        else:
            self._look(partial(in_array, value), origin)

    def _meet_opaque(self, value: Any, origin: Origin | None) -> None:
        """Note state that nothing can see: `check_visible` refuses it after the run."""
        self.hidden.append((value, origin))


def is_implicit(place: Namespace, name: str) -> bool:
    """Whether Python uses a name of a class without naming it."""
    # The namespace of a class is a mapping proxy, and those of objects and modules are dicts: in
    # these, special methods are not looked up.
    if type(place.owner) is SimpleNamespace or kind_of_class(type(place.owner)) == "whole":
        return True  # which compares, and prints, all that it has; or nobody knows what is read
    return type(place.mapping) is not dict and name.startswith("__") and name not in _UNREAD


def _is_short(key: Any) -> bool:
    return type(key) in (str, int, float, bool)
