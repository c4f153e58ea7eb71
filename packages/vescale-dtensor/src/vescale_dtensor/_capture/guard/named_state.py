"""The state that the code of a captured function names: what a recording may depend on.

Starting at the function and its arguments, the walk follows what code that it reaches names:
globals, closures, defaults, and attributes of objects, modules and classes that it reaches in turn.
An attribute counts, on every object that is reached, if any code that is reached has its name. It
is read off the code before anything runs: what a recording writes is found by comparing with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from sys import modules as imported
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from vescale_dtensor._capture.guard.code_files import (
    is_installed,
    is_library_class,
    is_library_module,
    is_users,
    reads_modules,
)
from vescale_dtensor._capture.guard.code_names import code_names
from vescale_dtensor._capture.guard.free_tensors import OutsideTensors
from vescale_dtensor._capture.guard.kinds import (
    kind_of_class,
    namespace_of,
    reads_all,
    slots_of,
    values_of,
)
from vescale_dtensor._capture.guard.module_guards import HOOKS, PARTS
from vescale_dtensor._capture.guard.places import MISSING, OF_TENSORS, Origin
from vescale_dtensor._torch.compat import global_module_hooks

# Guarded by `ModuleGuard`, which knows cheaper ways.
_OF_MODULES = frozenset({*HOOKS, *PARTS, "training"})
# Methods that Python calls by names that no code has; not what copies, prints or makes an object.
_UNCALLED = """
__repr__ __str__ __format__ __del__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__
__deepcopy__ __dir__ __sizeof__ __init_subclass__ __class_getitem__ __subclasshook__ __getnewargs__
"""
_UNNAMED = frozenset(_UNCALLED.split())
_MAKING = frozenset({"__init__", "__new__", "__post_init__", "__set_name__"})
_OF_SCALERS = frozenset({"_scale", "_growth_tracker"})

function_state: Callable[[Any], Any] = attrgetter("__code__", "__defaults__", "__kwdefaults__")


@dataclass(eq=False, slots=True)
class Namespace:
    """Names with values: the `__dict__` of an object, class, module or function, or globals.

    Attributes:
        mapping: the namespace itself. Held, as all that is met: the walk knows objects by id.
        was: what it held.
        origin: of it.
        owner: the object whose `__dict__` it is, if that may be given more, or another class.
        whole: whether every write to it is the function's affair, and not only those to names.
        names: of globals, those that code names; None: attributes count by name.
        excluded: names that are guarded elsewhere.
        followed: the names that count.
    """

    mapping: Mapping[str, Any]
    was: dict[str, Any]
    origin: Origin | None
    owner: Any = None
    whole: bool = False
    names: set[str] | None = None
    excluded: frozenset[str] = frozenset()
    followed: set[str] = field(default_factory=set)

    def at(self, name: str) -> Origin:
        """How code reaches a value in it."""
        if self.names is not None and self.origin is None:
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
class SingleValue:
    """Any other place: a variable of a closure, a slot, what a function is made of.

    Attributes:
        look: gives what it holds now, or MISSING.
        was: what it held.
        origin: of it.
        counts: whether code names it; of a slot known when all code is read.
    """

    look: Callable[[], Any]
    was: Any
    origin: Origin | None
    counts: bool = True


Place = Namespace | Contents | SingleValue


class NamedState:
    """What the code of a captured function names, as it is now.

    Args:
        values: what a call begins with, each with how code reaches it.
        unguarded: names that are not followed.

    Attributes:
        tensors: those from outside.
        modules: the torch modules.
        spaces, contents, looks: all places.
        parts: what modules hold in tables, which `ModuleGuard` compares.
        codes: all code that is reached.
        attributes: the names of attributes in it.
        stored: of attributes that it sets, and does not read, on new objects.
    """

    def __init__(
        self, values: Iterable[tuple[Any, Origin | None]], unguarded: frozenset[str]
    ) -> None:
        self.unguarded = unguarded
        self.tensors = OutsideTensors()
        self.modules: list[nn.Module] = []
        self.spaces: list[Namespace] = []
        self.contents: list[Contents] = []
        self.looks: list[SingleValue] = []
        self.parts: list[Contents] = []
        self.codes: list[CodeType] = []
        self.attributes: set[str] = {"forward"}  # which modules call without a name of the user's
        self.stored: set[str] = set()
        self._known: dict[int, Any] = {}  # which keeps them alive, and their ids their own
        self._read: set[CodeType] = set()
        # With the namespace of those that code has not named, whose `__init__` it does not call.
        self._classes: dict[type, Namespace | None] = {}
        # By name: the places that hold one of that name, which no code has named so far.
        self._pending: defaultdict[str, list[Namespace | SingleValue]] = defaultdict(list)
        self._groups: list[tuple[dict[str, Any], Origin]] = []
        self._globals: dict[int, Namespace] = {}
        # A list in place of recursion: chains of objects may be longer than Python's stack.
        self._queue: list[tuple[Any, Origin | None]] = list(values)
        self._queue += [(hook, None) for table in global_module_hooks() for hook in table.values()]
        while self._queue:
            self._take(*self._queue.pop())
        if "param_groups" in self.attributes:
            self._take_numbers()

    def has_met(self, value: Any) -> bool:
        """Whether a value is from outside: constants are not."""
        return id(value) in self._known

    def _take(self, value: Any, origin: Origin | None) -> None:
        """Take in one value; what it leads to waits."""
        kind = kind_of_class(type(value))
        if kind == "constant" or id(value) in self._known:
            return
        self._known[id(value)] = value
        take = getattr(self, f"_take_{kind}", None)
        if take is not None:  # else it counts by its identity
            take(value, origin)

    def _meet_all(self, values: Iterable[Any], origin: Origin | None, text: str = "[{}]") -> None:
        """Take in the items of a sequence; `text` is how messages write their index."""
        for index, value in enumerate(values):
            if kind_of_class(type(value)) != "constant":
                self._queue.append((value, Origin(origin, text.format(index), "")))

    # --- names

    def _name_attributes(self, names: Iterable[str]) -> None:
        """Follow these attributes of all objects, of those met so far as well."""
        for name in set(names) - self.attributes - self.unguarded:
            self.attributes.add(name)
            for place in self._pending.pop(name, ()):
                self._follow(place, name)

    def _add_namespace(self, space: Namespace, methods: frozenset[str] = frozenset()) -> None:
        """Remember a namespace; follow the names that count, let the others wait."""
        self.spaces.append(space)
        for name in space.was.keys() - space.excluded - self.unguarded:
            if name in self.attributes or name in methods:
                self._follow(space, name)
            elif space.names is None:
                self._pending[name].append(space)

    def _follow(self, space: Namespace | SingleValue, name: str) -> None:
        if isinstance(space, SingleValue):
            space.counts = True
            self._queue.append((space.was, space.origin))
            return
        space.followed.add(name)
        if name in space.was:
            self._queue.append((space.was[name], space.at(name)))
            if name == "__match_args__":  # what a `match` asks for by position
                self._name_attributes(space.was[name])

    def _read_code(self, code: CodeType, space: dict[str, Any]) -> None:
        """Follow what a code object names, and what is defined inside."""
        names = code_names(code)
        made = names.stored if code.co_name in _MAKING else frozenset()
        # What `__init__` sets on a new object is no state that a call depends on.
        self._name_attributes(names.attributes - made)
        self.stored |= made
        if not is_users(code) or code in self._read:
            return
        self._read.add(code)
        self.codes.append(code)
        held = self._globals.get(id(space))
        if held is None:
            held = Namespace(space, dict(space), None, names=set())
            self._globals[id(space)] = held
            self.spaces.append(held)
        assert held.names is not None
        installed = is_installed(code.co_filename)
        for name in names.globals - held.names - self.unguarded:
            held.names.add(name)
            if name in held.was:
                held.followed.add(name)
                # Of installed packages functions are followed, for what they ask of a model. Their
                # classes, and the tables that they keep for themselves, count by identity.
                if not installed or isinstance(held.was[name], FunctionType):
                    self._follow(held, name)
        package = str(space.get("__package__") or "")
        for name in names.modules:
            for full in (name, name.partition(".")[0], f"{package}.{name}".rstrip(".")):
                if full in imported:
                    self._queue.append((imported[full], Origin(None, f"module {full}", full)))

    # --- by kind

    def _take_function(self, value: FunctionType, origin: Origin | None) -> None:
        code, cells = value.__code__, value.__closure__ or ()
        users = is_users(code)
        if users or reads_modules(code):
            self._read_code(code, value.__globals__)
        if users and not is_installed(code.co_filename):
            place = Origin(None, f"default of {value.__name__}", "__defaults__")
            self.looks.append(
                SingleValue(partial(function_state, value), function_state(value), place)
            )
            self._meet_all(value.__defaults__ or (), place)
            self._meet_all((value.__kwdefaults__ or {}).values(), place)
        if users:
            for name, cell in zip(code.co_freevars, cells, strict=True):
                if name not in self.unguarded:
                    self._take_closed(cell, Origin(None, name, name))
        else:  # decorators and wrappers of libraries: what they call is the user's
            found = [in_cell(cell) for cell in cells]
            # In a table, too, as `singledispatch` has them.
            tables = [one.values() for one in found if type(one) is dict]
            self._meet_all([one for one in chain(found, *tables) if callable(one)], origin)
        if users or value.__dict__:
            self._add_namespace(Namespace(value.__dict__, dict(value.__dict__), origin, value))
            self._queue.append((value.__dict__.get("__wrapped__"), origin))

    def _take_closed(self, cell: CellType, origin: Origin) -> None:
        if id(cell) not in self._known:
            self._known[id(cell)] = cell
            held = in_cell(cell)
            self.looks.append(SingleValue(partial(in_cell, cell), held, origin))
            if origin.name != "__class__":
                self._queue.append((held, origin))
            elif isinstance(held, type):  # of `super()`, which makes no instance
                self._take_bases(held, making=False)

    def _take_tensor(self, value: Any, origin: Origin | None) -> None:
        self.tensors.add(value)
        # What this package keeps on wrappers changes in each call, and has guards of its own.
        space = vars(value)
        was = {k: v for k, v in space.items() if k not in OF_TENSORS}
        self._add_namespace(Namespace(space, was, origin, excluded=OF_TENSORS))
        self._take_class_of(value)

    def _take_module(self, value: nn.Module, origin: Origin | None) -> None:
        self.modules.append(value)
        space = vars(value)
        self._add_namespace(
            Namespace(space, dict(space), origin, value, whole=True, excluded=_OF_MODULES)
        )
        for name in (*PARTS, *HOOKS):
            table = space.get(name)
            if table is None:
                continue
            self._known[id(table)] = table
            self.parts.append(contents_of(table, Origin(origin, f".{name}", name)))
            for key, one in table.items():
                text = f".{key}" if name in PARTS else f" hook {key}"
                self._queue.append((one, Origin(origin, text, str(key))))
        self._take_class_of(value)

    def _take_object(self, value: Any, origin: Origin | None) -> None:
        space = namespace_of(value)
        if space is not None:
            held = Namespace(space, dict(space), origin, value, whole=True)
            self._add_namespace(held, frozenset(space) if reads_all(type(value)) else frozenset())
        for name, slot in slots_of(type(value)).items():
            if name not in self.unguarded:
                at, found = Origin(origin, f".{name}", name), in_slot(slot, value)
                look = SingleValue(partial(in_slot, slot, value), found, at, counts=False)
                self.looks.append(look)
                if name in self.attributes or reads_all(type(value)):
                    self._follow(look, name)
                else:
                    self._pending[name].append(look)
        self._take_class_of(value)

    _take_named = _take_object

    def _take_class_of(self, value: Any) -> None:
        self._take_bases(type(value), making=False)

    def _take_class(self, value: type, origin: Origin | None) -> None:
        if not is_installed(getattr(imported.get(value.__module__), "__file__", None)):
            self._take_bases(value, making=True)
            self._take_class_of(value)  # of classes that have a metaclass of the user's

    def _take_bases(self, value: type, *, making: bool) -> None:
        """Take in the namespaces of a class and of its bases.

        Args:
            value: the class.
            making: whether code names it, which may make instances.
        """
        for base in value.__mro__:
            if base in self._classes:
                space = self._classes[base]
                if making and space is not None:
                    self._classes[base] = None
                    for name in _MAKING & space.was.keys():
                        self._follow(space, name)
                continue
            self._classes[base] = None
            if is_library_class(base):
                if issubclass(base, nn.Module) and base is not nn.Module:
                    self._take_forward(base)
                continue
            title = Origin(None, f"class {base.__name__}", base.__name__)
            was = dict(vars(base))
            called = {name for name, one in was.items() if _is_called_unnamed(name, one)}
            methods = frozenset(called if making else called - _MAKING)
            space = Namespace(vars(base), was, title, base)
            self._classes[base] = None if making else space
            self._add_namespace(space, methods)

    def _take_forward(self, cls: type) -> None:
        """Take in what the code of a module of torch names: it counts as constant itself."""
        for one in vars(cls).values():
            reads = isinstance(one, FunctionType) and reads_modules(one.__code__)
            if reads and one.__name__ not in ("__init__", "extra_repr", "__setstate__"):
                self._name_attributes(code_names(one.__code__).attributes)

    def _take_contents(self, value: Any, origin: Origin | None) -> None:
        place = contents_of(value, origin)
        self.contents.append(place)
        if place.values is None:
            self._meet_all(place.items, origin)
        else:
            for key, item in zip(place.items, place.values, strict=True):
                # No repr of other keys: a tensor's would be an op.
                text = f"[{key!r:.40}]" if type(key) in (str, int) else "[...]"
                self._queue.append((item, Origin(origin, text, "")))
                self._queue.append((key, origin))
        if isinstance(value, defaultdict):
            self._queue.append((value.default_factory, origin))
        if not is_library_class(type(value)):
            self._take_object(value, origin)

    def _take_items(self, value: Any, origin: Origin | None) -> None:
        self._meet_all(value, origin)
        if not is_library_class(type(value)):
            self._take_object(value, origin)

    def _take_optimizer(self, value: Any, origin: Origin | None) -> None:
        """Take in which parameters an optimizer has: its numbers are read at each replay."""
        title = Origin(origin, ".param_groups", "param_groups")
        self.contents.append(contents_of(value.param_groups, title))
        for group in value.param_groups:
            self.contents.append(contents_of(group["params"], title))
            self._meet_all(group["params"], title)
            self._groups.append((group, title))

    def _take_numbers(self) -> None:
        """Take in the numbers of optimizers that code asks for itself, by constant keys."""
        texts = {text for code in self.codes for text in code_names(code).texts}
        for group, origin in self._groups:
            names = texts & group.keys() - {"params"}
            self.spaces.append(
                Namespace(group, dict(group), origin, names=names, followed=set(names))
            )

    def _take_scheduler(self, value: Any, origin: Origin | None) -> None:
        """Take in all numbers of a scheduler, so that a step of it is found to be a write."""
        self._name_attributes(["_last_lr"])  # which `get_last_lr` reads
        space = vars(value)
        self._add_namespace(Namespace(space, dict(space), origin, whole=True))

    def _take_scaler(self, value: Any, origin: Origin | None) -> None:
        space = vars(value)
        was = {name: space[name] for name in _OF_SCALERS & space.keys()}
        held = Namespace(space, was, origin, names=set(was))
        self.spaces.append(held)
        for name in was:
            self._follow(held, name)

    def _take_method(self, value: Any, origin: Origin | None) -> None:
        self._queue += [(value.__self__, origin), (value.__func__, origin)]

    def _take_builtin(self, value: Any, origin: Origin | None) -> None:
        if not isinstance(value.__self__, ModuleType | type):
            self._queue.append((value.__self__, origin))

    def _take_partial(self, value: Any, origin: Origin | None) -> None:
        self._queue += [(value.func, origin), (value.keywords, origin)]
        self._meet_all(value.args, origin)

    def _take_property(self, value: property, origin: Origin | None) -> None:
        self._queue += [(one, origin) for one in (value.fget, value.fset)]

    def _take_wrapped(self, value: Any, origin: Origin | None) -> None:
        self._queue.append((value.__wrapped__, origin))

    def _take_captured(self, value: Any, origin: Origin | None) -> None:
        self._queue.append((value.function, origin))

    def _take_cell(self, value: CellType, origin: Origin | None) -> None:
        self._queue.append((in_cell(value), origin))

    def _take_python_module(self, value: ModuleType, origin: Origin | None) -> None:
        file = getattr(value, "__file__", None)
        if not is_library_module(value.__name__) and not is_installed(file):
            title = Origin(None, f"module {value.__name__}", value.__name__)
            self._add_namespace(Namespace(vars(value), dict(vars(value)), title, value))


def _is_called_unnamed(name: str, value: Any) -> bool:
    """Whether Python calls a method of a class by a name that no code has."""
    special = name.startswith("__") and name.endswith("__") and name not in _UNNAMED
    return special and isinstance(value, FunctionType | staticmethod | classmethod)


def contents_of(container: Any, origin: Origin | None) -> Contents:
    """A container as it is now."""
    # Tuples, which hold the items: what is compared by identity later must not have been freed.
    return Contents(container, tuple(container), values_of(container), origin)


def in_slot(slot: Any, value: Any) -> Any:
    """What an object has in one of its slots."""
    try:
        return slot.__get__(value, type(value))
    except AttributeError:
        return MISSING


def in_cell(cell: CellType) -> Any:
    """What a variable of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
