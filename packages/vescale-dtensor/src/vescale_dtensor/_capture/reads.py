"""Everything outside that the code of a captured function can read: the walk of a recording.

Starting at the function and its arguments, the walk follows what code that ran can get at: globals
that it names, closures and defaults of functions, contents of containers, and attributes whose
names are in any code that ran so far, of any object met so far. A place is remembered as it is when
the walk first comes by. The walk is always ahead of the code: before a function runs for the first
time, the walk has taken in all names in it, those that it writes among them. So no code that is
watched reads or writes a place that was not remembered first.

Objects that the function makes are not met: only those that something from outside leads to.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from gc import get_referrers
from sys import modules as imported
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from vescale_dtensor._capture.code_files import (
    LIBRARY,
    TORCH,
    USER,
    is_library_class,
    is_library_module,
    kind_of_code,
)
from vescale_dtensor._capture.code_names import code_names
from vescale_dtensor._capture.kinds import kind_of_class, namespace_of, slots_of
from vescale_dtensor._capture.module_guards import HOOKS, PARTS, module_flags
from vescale_dtensor._capture.outside import OutsideTensors
from vescale_dtensor._capture.places import (
    MISSING,
    OF_TENSORS,
    Contents,
    Look,
    Namespace,
    Origin,
    Place,
    contents_of,
    function_state,
    in_cell,
)

# A bound on time and memory: beyond it the state counts as hidden, and the recording is refused.
_MOST = 200_000
_Function = tuple[FunctionType, Origin | None]
# Guarded by `ModuleGuard`, which knows cheaper ways.
_OF_MODULES = frozenset({*HOOKS, *PARTS, "training"})
# What Python puts into the namespace of a class for itself: no special method among it, so nothing
# is called through it unnamed.
_OF_CLASSES = """
__module__ __doc__ __dict__ __weakref__ __slots__ __annotations__ __firstlineno__ __qualname__
__static_attributes__ __match_args__ __abstractmethods__ _abc_impl __parameters__
__dataclass_params__ __orig_bases__
"""
_UNREAD = frozenset(_OF_CLASSES.split())


class Reads:
    """What a recording has met.

    Attributes:
        tensors: those from outside.
        modules: the torch modules.
        flags: of each of them, its mode and how many hooks it had.
        places: all places, in the order in which they were met.
        hidden: what was met whose state cannot be seen, with how code reaches it.
        codes: all code that ran and is watched.
        attributes: all names of attributes in it.
        any_attribute: whether it may use others.
        optional: those of attributes that may be missing: given to `hasattr`, say.
        unguarded: names that are not followed.
        parts: the parameters, buffers and submodules of modules, as they were.
    """

    def __init__(self, unguarded: frozenset[str]) -> None:
        self.tensors = OutsideTensors()
        self.modules: list[nn.Module] = []
        self.flags: list[tuple[Any, ...]] = []
        self.places: list[Place] = []
        self.hidden: list[tuple[Any, Origin | None]] = []
        self.codes: list[CodeType] = []
        self.attributes: set[str] = {"forward"}  # which modules call without a name of the user's
        self.any_attribute = False
        self.unguarded = unguarded
        self.optional: set[str] = set()
        self._known: dict[int, Any] = {}  # which keeps them alive, and their ids their own
        # By the name of an attribute: the namespaces that hold one of that name which no code has
        # named so far. They are followed once some code names it.
        self._pending: defaultdict[str, list[Namespace]] = defaultdict(list)
        self._globals: dict[int, Namespace] = {}
        self._ran: dict[int, CodeType] = {}
        # Ids of code objects; `_ran` keeps alive the code that has them among its constants.
        self._inner: set[int] = set()
        # By id of the code: functions that were met and have not run, whose closures are not
        # followed.
        self._waiting: defaultdict[int, list[_Function]] = defaultdict(list)
        self._queue: list[tuple[Any, Origin | None]] = []
        self.parts: list[Contents] = []
        # Containers that `parts` and `ModuleGuard` guard, so that they are not compared twice.
        self._part_ids: set[int] = set()

    # --- what runs

    def runs(self, code: CodeType, space: dict[str, Any]) -> None:
        """Take in a function that is about to run for the first time."""
        self._ran[id(code)] = code  # kept alive, so that no other code gets its id
        kind = kind_of_code(code)
        # The globals of library code are not followed, so the environment that it reads is met
        # here.
        if code is os.getenv.__code__:
            self.meet(os.environ, Origin(None, "os.environ", "environ"))
        if kind != LIBRARY:
            self.codes.append(code)
            self._note_names(code, space, kind)
        waiting = self._waiting.pop(id(code), None)
        if waiting is None and code.co_freevars and id(code) not in self._inner and kind == USER:
            # No place led here (a decorator written in C may hold the function), and its closure is
            # state from outside. A function that was defined inside of one that ran has the
            # variables of that one.
            # Several functions may share the code; which one runs is not known, so all are taken
            # in.
            found = get_referrers(code)
            waiting = [(f, None) for f in found if isinstance(f, FunctionType)]
        for function, origin in waiting or ():
            self._enter(function, origin)
        # Functions that this one defines, whose closures are made of its own variables.
        self._inner.update(id(c) for c in code.co_consts if isinstance(c, CodeType))
        self._walk()

    def has_run(self, code: CodeType) -> bool:
        """Whether a function ran before."""
        return id(code) in self._ran

    def _note_names(self, code: CodeType, space: dict[str, Any], kind: str) -> None:
        """Follow what the names in a code object lead to, before the code runs."""
        names = code_names(code)
        if kind == USER:
            self._name_globals(space, names.globals)
            self.any_attribute |= names.any_attribute
            for name in names.modules:
                # The statement has not run yet. If it imports a module for the first time, there is
                # nothing to meet: the body of the module then runs watched, and its new globals
                # count as a change that the function made, so this recording is not kept.
                self._meet_imported(name, str(space.get("__package__") or ""))
        elif code.co_filename.startswith(TORCH):
            self._name_tables(space, names.globals)
        self._name_attributes(names.attributes, names.optional if kind == USER else ())
        if self.any_attribute:  # getattr with a name that is computed may read any of them
            for name in list(self._pending):
                for place in self._pending.pop(name):
                    self._follow(place, name)

    def _meet_imported(self, name: str, package: str) -> None:
        """Take in what an import statement gives; a relative name counts in all packages around."""
        parents = [package.rsplit(".", up)[0] for up in range(package.count(".") + 1)]
        for full in (name, name.partition(".")[0], *(f"{p}.{name}".rstrip(".") for p in parents)):
            self.meet(imported.get(full), Origin(None, f"module {full}", full))

    def _name_attributes(self, names: Iterable[str], optional: Iterable[str]) -> None:
        """Follow these attributes of all objects met so far, and of those met later."""
        self.optional.update(optional)
        for name in set(names) - self.attributes - self.unguarded:
            self.attributes.add(name)
            for place in self._pending.pop(name, ()):
                self._follow(place, name)

    def _name_globals(self, space: dict[str, Any], names: Iterable[str]) -> None:
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
            self._follow(place, name)

    def _name_tables(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Of the globals of torch, those that hold what users register: hooks, say."""
        tables = [name for name in names if isinstance(space.get(name), dict | list | set)]
        if tables:
            self._name_globals(space, tables)

    # --- what is met

    def meet(self, value: Any, origin: Origin | None) -> None:
        """Take in a value that code can get at; what it leads to follows in `_walk`."""
        if self._is_new(value):
            # Before it is visited, so that a cycle ends.
            self._known[id(value)] = value
            self._queue.append((value, origin))

    def _is_new(self, value: Any) -> bool:
        """Whether a value has state, and was not met yet."""
        return id(value) not in self._known and kind_of_class(type(value)) != "constant"

    def has_met(self, value: Any) -> bool:
        """Whether a value is from outside: constants are not."""
        return id(value) in self._known

    def start(self, values: Iterable[tuple[Any, Origin | None]]) -> None:
        """Take in what a call begins with: the function and its arguments."""
        for value, origin in values:
            self.meet(value, origin)
        self._walk()

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

    # --- by kind

    def _meet_tensor(self, value: Any, origin: Origin | None) -> None:
        """Take in a tensor from outside, and what users have set on it."""
        self.tensors.add(value)
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
                self._look(partial(_in_slot, slot, value), Origin(origin, f".{name}", name))
        self.meet(type(value), origin)

    def _meet_module(self, value: Any, origin: Origin | None) -> None:
        """Take in a torch module: its attributes, parts and hooks, each by its own guard."""
        self.modules.append(value)
        # Before the function can change them: `own_changes` compares with these.
        self.flags.append(module_flags(value))
        space = namespace_of(value)
        assert space is not None
        self._add_namespace(Namespace(space, dict(space), origin, value, excluded=_OF_MODULES))
        for name in PARTS:
            part = space.get(name) or {}
            self.parts.append(contents_of(part, Origin(origin, f".{name}", name)))
            self._part_ids.add(id(part))
            if name == "_modules":  # only those that code names: others are not called
                self._add_namespace(Namespace(part, dict(part), origin, excluded=frozenset(part)))
            else:
                for key, tensor in part.items():
                    self.meet(tensor, Origin(origin, f".{key}", key))
        for name in HOOKS:
            hooks = space.get(name) or {}
            self._part_ids.add(id(hooks))
            # torch calls hooks, so no code of the user's names them.
            self._meet_all(hooks.values(), origin, " hook {}")
        self.meet(type(value), origin)

    def _meet_contents(self, value: Any, origin: Origin | None) -> None:
        """Take in a list, dict, set or deque, and all keys and values in it."""
        place = contents_of(value, origin)
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
        if not is_library_class(type(value)):
            self._meet_object(value, origin)

    def _meet_items(self, value: Any, origin: Origin | None) -> None:
        self._meet_all(value, origin)
        if not is_library_class(type(value)):
            self._meet_object(value, origin)

    def _meet_environment(self, value: Any, origin: Origin | None) -> None:
        """Take in the variables of the environment, as one value."""
        self._look(partial(_environment, value), origin)

    def _meet_function(self, value: FunctionType, origin: Origin | None) -> None:
        """Take in a function: what it closes over at once if it has run, else when it runs."""
        code = value.__code__
        if kind_of_code(code) == USER:
            self._add_namespace(Namespace(value.__dict__, dict(value.__dict__), origin))
        # A closure matters once its function runs; functions that never do may close over anything.
        if id(code) in self._ran:
            self._enter(value, origin)
        else:
            self._waiting[id(code)].append((value, origin))

    def _enter(self, function: FunctionType, origin: Origin | None) -> None:
        """Take in what a function that runs brings along."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in self.unguarded:
                self._meet_variable_of(cell, Origin(None, f"closure variable {name}", name))
        if kind_of_code(code) != USER:
            return
        # Replacing `__code__` or `__defaults__` leaves the function itself, and all that refers to
        # it.
        title = f"default of {function.__name__}"
        self._look(partial(function_state, function), Origin(None, title, "__defaults__"))

    def _meet_variable_of(self, cell: CellType, origin: Origin) -> None:
        """Take in what a variable of a closure holds, named after the variable."""
        if id(cell) not in self._known:
            self._known[id(cell)] = cell
            self._look(partial(in_cell, cell), origin)

    def _meet_cell(self, value: CellType, origin: Origin | None) -> None:
        self._look(partial(in_cell, value), origin)

    def _meet_method(self, value: MethodType, origin: Origin | None) -> None:
        self.meet(value.__self__, origin)
        self.meet(value.__func__, origin)

    def _meet_partial(self, value: Any, origin: Origin | None) -> None:
        self.meet(value.func, origin)
        self._meet_all(value.args, origin)
        self.meet(value.keywords, origin)

    def _meet_builtin(self, value: Any, origin: Origin | None) -> None:
        """Take in what a builtin method is bound to."""
        if not isinstance(value.__self__, ModuleType):
            self.meet(value.__self__, origin)  # a list's append, a dict's get

    def _meet_getter(self, value: Any, origin: Origin | None) -> None:
        """Take in the names that an `attrgetter` or `methodcaller` will read."""
        given = value.__reduce__()[1]
        names = [name for one in given if type(one) is str for name in one.split(".")]
        self._name_attributes(names, names)

    def _meet_view(self, value: Any, origin: Origin | None) -> None:
        self.meet(value.mapping, origin)

    def _meet_wrapped(self, value: Any, origin: Origin | None) -> None:
        self.meet(getattr(value, "__wrapped__", None), origin)

    def _meet_property(self, value: property, origin: Origin | None) -> None:
        for function in (value.fget, value.fset, value.fdel):
            self.meet(function, origin)

    def _meet_class(self, value: type, origin: Origin | None) -> None:
        """Take in the namespaces of a class and of its bases that users wrote."""
        for base in value.__mro__:
            if is_library_class(base) or (base is not value and id(base) in self._known):
                continue
            self._known[id(base)] = base
            title = Origin(None, f"class {base.__name__}", base.__name__)
            self._add_namespace(Namespace(vars(base), dict(vars(base)), title))
        if not is_library_class(value):
            # Assigning `__bases__` changes which class an attribute comes from, and no namespace.
            self._look(partial(getattr, value, "__mro__"), origin)

    def _meet_python_module(self, value: ModuleType, origin: Origin | None) -> None:
        """Take in the globals of a Python module, unless they count as constant."""
        if not is_library_module(value.__name__):
            title = Origin(None, f"module {value.__name__}", value.__name__)
            self._add_namespace(Namespace(vars(value), dict(vars(value)), title))
        elif value is os:
            space = {"environ": os.environ}
            self._add_namespace(Namespace(space, dict(space), Origin(None, "os", "os")))

    def _meet_captured(self, value: Any, origin: Origin | None) -> None:
        """Take in the function of a captured one: inside of a recording it runs itself."""
        self.meet(value.function, origin)

    def _meet_weak(self, value: Any, origin: Origin | None) -> None:
        """Take in what a weak reference leads to, if it lives; the guard asks it again."""
        self._look(value, origin)

    def _meet_variable(self, value: Any, origin: Origin | None) -> None:
        """Take in what a context variable is set to."""
        # With a default: a variable that is not set would raise, here and in the guard.
        self._look(partial(value.get, None), origin)

    def _meet_bytes(self, value: Any, origin: Origin | None) -> None:
        # By value: the buffer stays the same object whatever is written into it.
        self._look(partial(bytes, value), origin)

    def _meet_array(self, value: Any, origin: Origin | None) -> None:
        """Take in the values of a small numpy array."""
        # A guard copies and compares the values at each call. Objects in an array could be changed
        # without a change of their addresses, which are all that the bytes of it show.
        if value.nbytes > _BIGGEST_ARRAY or value.dtype.hasobject:
            self.hidden.append((value, origin))
        else:
            self._look(partial(_in_array, value), origin)

    def _meet_opaque(self, value: Any, origin: Origin | None) -> None:
        """Note state that nothing can see: `check_visible` refuses it after the run."""
        self.hidden.append((value, origin))


_BIGGEST_ARRAY = 1 << 16


def is_implicit(place: Namespace, name: str) -> bool:
    """Whether Python uses a name of a class without naming it."""
    # The namespace of a class is a mapping proxy, and those of objects and modules are dicts: in
    # these, special methods are not looked up.
    return type(place.mapping) is not dict and name.startswith("__") and name not in _UNREAD


def _is_short(key: Any) -> bool:
    return type(key) in (str, int, float, bool)


def _in_slot(slot: Any, value: Any) -> Any:
    """What a slot of an object holds; MISSING if nothing."""
    try:
        return slot.__get__(value, type(value))
    except AttributeError:
        return MISSING


def _environment(value: Any) -> Any:
    """All variables of the environment."""
    # As `os` keeps them, without decoding each. Sorted, since their order has no meaning.
    return tuple(sorted(value._data.items()))


def _in_array(value: Any) -> Any:
    """What distinguishes arrays: dtype, shape, values."""
    return value.dtype.str, value.shape, value.tobytes()
