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

import builtins
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from functools import partial
from gc import get_referrers
from sys import modules as imported
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from vescale_dtensor._capture.code_files import (
    LIBRARY,
    TORCH,
    USER,
    is_of_python,
    kind_of_code,
)
from vescale_dtensor._capture.code_names import CodeNames, code_names
from vescale_dtensor._capture.libraries import missing_of_imports, missing_on
from vescale_dtensor._capture.looks import Steady
from vescale_dtensor._capture.places import (
    Namespace,
    Origin,
    function_state,
    in_cell,
)
from vescale_dtensor._capture.process_state import is_called_by_users, numpy_draws
from vescale_dtensor._capture.walk import Walk

_BUILTINS = vars(builtins)
_ENVIRONMENT = frozenset({"environ", "environb"})
# Whoever names one of these asks functions about themselves, be they called or not.
_CLOSURE = "__closure__"
_DEFAULTS = frozenset({"__defaults__", "__kwdefaults__", "__code__"})
# What functions have beside their namespaces, and may be set.
_OF_FUNCTIONS = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})
_OF_OTHERS = frozenset({"base", "__traceback__"})  # of arrays and exceptions
_ASKED = frozenset({_CLOSURE}) | _DEFAULTS | _OF_FUNCTIONS | _OF_OTHERS
# What users may hang on functions so that they seem to be others.
_TOLD = frozenset({"__signature__", "__wrapped__"})
# Parts of the standard library that ask functions and classes about themselves.
_ASKING = ("/inspect.py", "/typing.py")
_FUNCTIONS = FunctionType, BuiltinFunctionType
_REPLACEABLE = (*_FUNCTIONS, type, ModuleType)
# A cache is switched on by a number, a way of sharing memory chosen by a text.
_SETTINGS = (bool, int, float, str, type(None))
_TABLES = (dict, list, set, *_SETTINGS)


class StateReads(Walk):
    """What the code of a recording can read.

    Args:
        unguarded: names that are not followed.

    Attributes:
        codes: all code that ran and is watched.
        identity: whether code of the user's may ask which of two equal objects it has.
        values: names of variables whose values code of the user's takes without calling them.
        parts_taken: names of attributes of which it does.
    """

    def __init__(self, unguarded: frozenset[str]) -> None:
        super().__init__(unguarded)
        self.codes: list[CodeType] = []
        self.identity = False
        self.values: set[str] = set()
        self.parts_taken: set[str] = set()
        self._ran: dict[int, CodeType] = {}
        # Ids of code objects; `_ran` keeps alive the code that has them among its constants.
        self._inner: set[int] = set()
        # By id of the code: functions that were met and have not run, whose closures are not
        # followed.
        self._waiting: defaultdict[int, list[FunctionType]] = defaultdict(list)
        # By id: the code of functions that were met, which `_known` keeps alive.
        self._met: set[int] = set()
        self._entered: dict[int, FunctionType] = {}  # whose defaults are guarded
        # What code asks of functions and arrays, by names that are in no namespace; who has it.
        self._asked: set[str] = set()
        self._askable: list[tuple[Any, Origin | None]] = []

    # --- what runs

    def runs(self, code: CodeType, space: dict[str, Any]) -> None:
        """Take in a function that is about to run for the first time."""
        self._ran[id(code)] = code  # kept alive, so that no other code gets its id
        kind = kind_of_code(code)
        # The globals of library code are not followed, so the environment that it reads is met
        # here.
        if not _ENVIRONMENT.isdisjoint(code.co_names) and is_of_python(code):
            self.meet(os.environ, Origin(None, "os.environ", "environ"))
        if kind != LIBRARY:
            self.codes.append(code)
            self._note_names(code, space, kind)
        elif code.co_filename.startswith(TORCH):
            self._name_settings(space, code.co_names)
        elif code.co_filename.endswith(_ASKING):
            names = code_names(code).attributes & (_ASKED | _TOLD)
            self._name_attributes(names)
            self.goes_on = True
            self._ask_all(names & _ASKED)
        waiting = self._waiting.pop(id(code), None)
        if waiting is None and kind == USER:
            self._find_what_leads_to(code)
        if waiting is None and code.co_freevars and id(code) not in self._inner and kind == USER:
            # No place led here (a decorator written in C may hold the function), and its closure is
            # state from outside. A function that was defined inside of one that ran has the
            # variables of that one.
            # Several functions may share the code; which one runs is not known, so all are taken
            # in.
            found = get_referrers(code)
            waiting = [f for f in found if isinstance(f, FunctionType)]
        for function in waiting or ():
            self._enter(function)
        # Functions that this one defines, whose closures are made of its own variables.
        self._inner.update(id(c) for c in code.co_consts if isinstance(c, CodeType))
        self._walk()

    def _find_what_leads_to(self, code: CodeType) -> None:
        """Take in where a function comes from that runs and was not met.

        Python calls methods by names that no code has (`keys`, for `**mapping`). Else something in
        C holds it (a handler of errors of `encode`), where nobody sees that it is another one.
        What libraries call (hooks, operators) they keep in tables, which have guards of their own.
        """
        # Functions that are defined inside, bodies of modules, and code that is executed.
        if id(code) in self._inner or code.co_filename.startswith("<") or id(code) in self._met:
            return
        self._name_attributes([code.co_name])
        self._walk()
        if id(code) in self._met or code.co_name in {"<module>", *self.unguarded}:
            return
        if is_called_by_users(sys._getframe(2)):
            where = Origin(None, f"the function {code.co_qualname}", code.co_name)
            self.hidden.append(("called by code in C", where))

    def has_run(self, code: CodeType) -> bool:
        """Whether a function ran before."""
        return id(code) in self._ran

    def _note_names(self, code: CodeType, space: dict[str, Any], kind: str) -> None:
        """Follow what the names in a code object lead to, before the code runs."""
        names = code_names(code)
        if kind == USER:
            whole = "globals" in names.globals or names.attributes & {"f_globals", "__globals__"}
            # Without what the import system keeps there for itself.
            own = [name for name in space if whole and not name.startswith("__")]
            self._name_globals(space, {*own, *names.globals})
            # What is no global is a builtin, which anybody may have added or replaced.
            known = _builtins_of(space)
            self._name_globals(known, names.globals - space.keys(), follow=known is not _BUILTINS)
            self._guard_libraries(self._libraries.name(names.attributes, names.optional))
            self.any_attribute |= names.any_attribute
            self.goes_on |= names.goes_on
            if names.any_attribute and not self.computes_names:
                self.computes_names = True
                self._guard_any_names()
            self.identity |= names.identity
            self.values |= names.values
            self.parts_taken |= names.parts
            self._ask_of_libraries(names)
            for path in names.paths:
                self._guard_libraries(missing_on(path, space))
            self._guard_libraries(missing_of_imports(names.modules, names.attributes))
            for text in names.texts:
                # One that is not there may be later: `"name" in sys.modules`.
                if all(map(str.isidentifier, text.split("."))):
                    self._meet_imported(text, "")
            for name in names.modules:
                # The statement has not run yet. If it imports a module for the first time, there is
                # nothing to meet: the body of the module then runs watched, and its new globals
                # count as a change that the function made, so this recording is not kept.
                self._meet_imported(name, str(space.get("__package__") or ""))
        elif code.co_filename.startswith(TORCH):
            self._name_tables(space, names.globals)
            self._name_functions(space, names)
        elif is_of_python(code):
            self._name_settings(space, names.globals)
            # Not classes: those of Python lead to what `isinstance` asks, which changes.
            self._name_functions(space, names, _FUNCTIONS)
            if "_FIELDS" in names.globals:  # by which dataclasses find those of a class
                self._name_attributes(["__dataclass_fields__"])
        self._name_attributes(names.attributes)
        self._ask_all(names.attributes & _ASKED)
        if self.any_attribute:  # getattr with a name that is computed may read any of them
            self._follow_all()

    def _ask_of_libraries(self, names: CodeNames) -> None:
        """Take in state that libraries keep, and that no function which is heard gives."""
        asked = names.globals | names.attributes
        if "get_state" in asked:  # of numpy's generator
            self._look(Steady(numpy_draws), Origin(None, "numpy.random", "random"))
        if "modules" in asked:  # which there are
            self._look(partial(len, imported), Origin(None, "sys.modules", "modules"))

    def read_any_attribute(self) -> None:
        """Take in that code of a library is about to read attributes of any name."""
        self._follow_all()
        self._walk()

    def import_module(self, name: str) -> None:
        """Take in a Python module that code is about to ask for by its name."""
        self._meet_imported(name, "")
        self._walk()

    def taken_from(self, place: Namespace) -> set[str]:
        """The names in a namespace whose values code of the user's takes without calling them."""
        if place.names is None:
            return self.parts_taken & place.was.keys()
        own = self.parts_taken if self._libraries.has(place.mapping) else self.values
        return own & place.names & place.was.keys()

    def ask(self, look: Callable[[], Any], origin: Origin) -> None:
        """Take in that code asks for a state that has no place: the guard asks again."""
        self._look(Steady(look), origin)
        self._walk()

    def _meet_imported(self, name: str, package: str) -> None:
        """Take in what an import statement gives; a relative name counts in all packages around."""
        parents = [package.rsplit(".", up)[0] for up in range(package.count(".") + 1)]
        for full in (name, name.partition(".")[0], *(f"{p}.{name}".rstrip(".") for p in parents)):
            # As a place: another module, or one where there was none, may be put there.
            self._look(partial(imported.get, full), Origin(None, f"module {full}", full))

    def _name_tables(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Of the globals of torch, those that hold what users register: hooks, say."""
        tables = [name for name in names if isinstance(space.get(name), _TABLES)]
        if tables:
            self._name_globals(space, tables)

    def _name_settings(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Of the globals of a library, the numbers and texts that say how it works."""
        named = [name for name in names if type(space.get(name, space)) in _SETTINGS]
        if named:
            self._name_globals(space, named, follow=False)

    def _name_functions(
        self,
        space: dict[str, Any],
        names: CodeNames,
        kinds: tuple[type, ...] = _REPLACEABLE,
    ) -> None:
        """Of the globals of a library, the functions that users may replace."""
        held = {name: space[name] for name in names.globals & space.keys()}
        functions = [name for name, one in held.items() if isinstance(one, kinds)]
        self._name_globals(space, functions, follow=False)
        for one in held.values():
            if isinstance(one, ModuleType | type):  # `F`, `torch`, `json.JSONEncoder`
                self._guard_libraries(self._libraries.add(one))
        self._guard_libraries(self._libraries.name(names.attributes, ()))

    def name_methods(self, names: Iterable[str]) -> None:
        """Take in methods of tensors that the code of the program calls by their names."""
        self._guard_libraries(self._libraries.methods(names))

    def start(self, values: Iterable[tuple[Any, Origin | None]]) -> None:
        """Take in what a call begins with: the function and its arguments."""
        for value, origin in values:
            self.meet(value, origin)
        self._walk()

    def _meet_function(self, value: FunctionType, origin: Origin | None) -> None:
        """Take in a function: what it closes over at once if it has run, else when it runs."""
        code = value.__code__
        self._met.add(id(code))
        if kind_of_code(code) == USER:
            self._add_namespace(Namespace(value.__dict__, dict(value.__dict__), origin))
            self._add_askable(value, origin)
        elif value.__dict__:  # what `singledispatch` and its like hang on their functions
            self._add_namespace(Namespace(value.__dict__, dict(value.__dict__), origin))
        # A closure matters once its function runs; functions that never do may close over anything.
        if id(code) in self._ran:
            self._enter(value)
        else:
            self._waiting[id(code)].append(value)
            self._meet_asked(value, self._asked)

    def _follow_all(self) -> None:
        """Follow all attributes of all objects met so far."""
        super()._follow_all()
        self._ask_all(_OF_FUNCTIONS)

    def _ask_all(self, names: Set[str]) -> None:
        """Take in what code with these names may ask of functions and arrays."""
        new = names - self._asked - self.unguarded
        if not new:
            return
        self._asked |= new
        for function in [one for found in self._waiting.values() for one in found]:
            self._meet_asked(function, new)
        for value, origin in self._askable:
            self._ask_named(value, origin, new)

    def _add_askable(self, value: Any, origin: Origin | None) -> None:
        """Take in a function, or an array, of which code may ask what is in no namespace."""
        self._askable.append((value, origin))
        self._ask_named(value, origin, self._asked)

    def _ask_named(self, value: Any, origin: Origin | None, names: Set[str]) -> None:
        mine = _OF_FUNCTIONS if isinstance(value, FunctionType) else _OF_OTHERS
        for name in sorted(name for name in names & mine if hasattr(value, name)):
            self._look(partial(getattr, value, name), Origin(origin, f".{name}", name))

    def _meet_array(self, value: Any, origin: Origin | None) -> None:
        super()._meet_array(value, origin)
        self._add_askable(value, origin)

    def _meet_named(self, value: Any, origin: Origin | None) -> None:
        super()._meet_named(value, origin)
        if isinstance(value, BaseException):
            self._add_askable(value, origin)

    def _meet_asked(self, function: FunctionType, names: Set[str]) -> None:
        """Take in what code with these names may ask of a function that does not run."""
        if _CLOSURE in names:
            self._meet_closure(function)
        if not _DEFAULTS.isdisjoint(names):
            self._meet_defaults(function)

    def _enter(self, function: FunctionType) -> None:
        """Take in what a function that runs brings along."""
        self._meet_closure(function)
        self._meet_defaults(function)

    def _meet_closure(self, function: FunctionType) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if name not in self.unguarded:
                self._meet_variable_of(cell, Origin(None, f"closure variable {name}", name))

    def _meet_defaults(self, function: FunctionType) -> None:
        """Take in the code of a function of the user's, and its defaults."""
        # Replacing `__code__` or `__defaults__` leaves the function itself, and all that refers to
        # it.
        if kind_of_code(function.__code__) == USER and id(function) not in self._entered:
            self._entered[id(function)] = function
            title = f"default of {function.__name__}"
            self._look(partial(function_state, function), Origin(None, title, "__defaults__"))

    def _meet_variable_of(self, cell: CellType, origin: Origin) -> None:
        """Take in what a variable of a closure holds, named after the variable."""
        if id(cell) not in self._known:
            self._known[id(cell)] = cell
            self._look(partial(in_cell, cell), origin)


def _builtins_of(space: dict[str, Any]) -> dict[str, Any]:
    """The builtins of a file: code that is executed may have been given its own."""
    found = space.get("__builtins__", _BUILTINS)
    return vars(found) if isinstance(found, ModuleType) else found
