"""What user code names in libraries: users replace functions and methods of torch and others.

The code of libraries counts as constant, but not which function a name there stands for:
`torch.nn.Linear.forward = mine`, or a faster attention. The guard compares what the names hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from sys import modules as imported
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from vescale_dtensor._capture.code_files import (
    USER,
    is_library_class,
    is_library_module,
    kind_of_code,
)
from vescale_dtensor._capture.kinds import kind_of_class
from vescale_dtensor._tensor.dtensor import DTensor

# Beside what code names: what torch and Python call of a class without naming it in user code.
_CALLED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
# What users replace: functions, classes, and settings. Not what a library keeps for itself.
_REPLACEABLE = (FunctionType, BuiltinFunctionType, type)
_SETTINGS = (bool, int, float, str)
# What libraries hold for users to change: `os.environb`, `logging.root`, `sys.argv`.
_FOLLOWED = frozenset({"python_module", "class", "environment", "logger", "variable"})
_FOLLOWED |= {"object", "handler"}
_BACKENDS = "torch.backends"
_LRU: Any = type(lru_cache(lambda: None))
# Methods of tensors are those of a class in C, until one is put before it.
_OF_TENSORS = frozenset(dir(Tensor.__base__)) - {"__dict__"}
# What torch's compiler sets on `nn.Module` the first time that it runs in a process; what Python
# remembers of a class when the first instance is copied.
_MARKS = frozenset({"___needs_generation_tag_patch", "__slotnames__"})
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: classes in C whose attributes cannot be set


Names = tuple[Mapping[str, Any], set[str]]
"""A namespace, and names in it that are to be compared."""


class Libraries:
    """The namespaces of library classes and Python modules that a recording met."""

    def __init__(self) -> None:
        # By id, with the owner: of a class, `vars` gives another view each time.
        self._spaces: dict[int, tuple[Any, Mapping[str, Any]]] = {}
        self._named: set[str] = set(_CALLED)
        self._optional: set[str] = set()
        # By id: those that users' code reaches, whose names are compared so far as code has them.
        self._reached: dict[int, Any] = {}
        self._compared: set[int] = set()  # ids of those of which all names are

    def has(self, space: Mapping[str, Any]) -> bool:
        """Whether a namespace is one of a library's."""
        return any(found is space for _, found in self._spaces.values())

    def name(self, names: Iterable[str], optional: Iterable[str]) -> Iterator[Names]:
        """Take in attributes that user code names; the optional ones may be missing."""
        new = set(names) - self._named
        self._named |= new
        self._optional.update(optional)
        for owner, space in list(self._spaces.values()):
            yield space, self._relevant(owner, space, new)

    def add(self, owner: Any) -> Iterator[Names]:
        """Take in a class, or a Python module."""
        if id(owner) in self._spaces or (isinstance(owner, type) and owner.__flags__ & _IMMUTABLE):
            return
        space = vars(owner)
        self._spaces[id(owner)] = owner, space
        yield space, self._relevant(owner, space, self._named)

    def reach(self, owner: Any) -> Iterator[Names]:
        """Take in a class, or a Python module, that users' code reaches."""
        yield from self.add(owner)
        if id(owner) in self._spaces and id(owner) not in self._compared:
            self._reached[id(owner)] = owner

    def by_any_name(self) -> Iterator[Names]:
        """What users' code can read there by names that it computes; each namespace once."""
        while self._reached:
            key, owner = self._reached.popitem()
            self._compared.add(key)
            yield _replaceable(owner)

    def methods(self, names: Iterable[str]) -> Iterator[Names]:
        """Take in methods of tensors that the code of a program names."""
        space = self._spaces[id(Tensor)][1]
        yield space, self._relevant(Tensor, space, set(names))

    def _relevant(self, owner: Any, space: Mapping[str, Any], names: set[str]) -> set[str]:
        """Those of the names that a namespace has, or may be given."""
        if isinstance(owner, ModuleType) and (
            type(owner) is not ModuleType or "__getattr__" in space
        ):
            return names  # it answers for missing names, so to have one later makes a difference
        inherited = _OF_TENSORS if owner in (Tensor, DTensor) else frozenset()
        return names & (space.keys() | self._optional | inherited)


def missing_on(path: tuple[str, ...], space: Mapping[str, Any]) -> Iterator[Names]:
    """Where to look for the name that a library lacks on a path of attributes, if there is one.

    To have it later makes a difference wherever code goes on without it. It may be a caller that
    does, so what the code itself catches does not matter.

    Args:
        path: a global, and the attributes that are read one of another.
        space: the globals of the code that reads them.
    """
    owner = space.get(path[0])
    for name in path[1:]:
        if not isinstance(owner, ModuleType | type):
            return
        spaces = _namespaces(owner)
        found = next((one for one in spaces if name in one), None)
        if found is None:
            yield from ((one, {name}) for one in spaces if _is_of_library(owner))
            return
        owner = found[name]


def missing_of_imports(modules: Iterable[str], names: AbstractSet[str]) -> Iterator[Names]:
    """Where to look for names that libraries lack which a function imports for itself.

    Args:
        modules: those that its `import` statements name.
        names: all attributes that it reads, of whatever; what it imports from a module among them.
    """
    for full in modules:
        parts = full.split(".")
        met = [imported.get(".".join(parts[: end + 1])) for end in range(len(parts))]
        if isinstance(met[-1], ModuleType):  # others may put anything there
            # Not `getattr`, which may import what a module has by need.
            met += [vars(met[-1]).get(name) for name in names]
        for owner in {id(one): one for one in met}.values():
            if isinstance(owner, ModuleType) and _is_of_library(owner):
                yield vars(owner), set(names - vars(owner).keys())


def _namespaces(owner: Any) -> list[Mapping[str, Any]]:
    """Those in which an attribute of a Python module, or of a class, is looked for."""
    owners = [owner] if isinstance(owner, ModuleType) else owner.__mro__
    return [vars(one) for one in owners]


def _is_of_library(owner: Any) -> bool:
    """Whether what a Python module, or a class, holds counts as constant."""
    if isinstance(owner, ModuleType):
        return is_library_module(owner.__name__)
    return is_library_class(owner) and not owner.__flags__ & _IMMUTABLE


def _replaceable(owner: Any) -> Names:
    """The names in a library's class, or Python module, that stand for what users may replace."""
    space: Mapping[str, Any] = vars(owner)
    # Classes that a library keeps for itself count there what they do: hits of caches, say.
    counts = not isinstance(owner, ModuleType) and "._" in owner.__module__
    names = {
        name
        for name, value in tuple(space.items())
        if isinstance(value, _REPLACEABLE)
        or (isinstance(value, _SETTINGS) and not name.startswith("_") and not counts)
    }
    return space, names


def has_only_imported(space: Mapping[str, Any], names: AbstractSet[str]) -> bool:
    """Whether a library's namespace has these names still, and else only what imports put there.

    Those are parts of a package, which come one by one: torch's compiler imports many of torch.
    """
    new = space.keys() - names
    return len(space) - len(new) == len(names) and all(_is_imported(space, one) for one in new)


def _is_imported(space: Mapping[str, Any], name: str) -> bool:
    value, full = space.get(name), f"{space.get('__name__')}.{name}"
    return name in _MARKS or (isinstance(value, ModuleType) and imported.get(full) is value)


def is_kept_there(value: Any) -> bool:
    """Whether what a library holds under a name is for users to change, or what they keep there."""
    if kind_of_class(type(value)) in _FOLLOWED:
        return True
    if isinstance(value, FunctionType | staticmethod | classmethod | property | partial | _LRU):
        return _is_users(value)
    if isinstance(value, list | dict | set):
        return value is not imported
    if isinstance(value, MethodType):  # `reprlib.repr`, of an object that users may set up
        return kind_of_class(type(value.__self__)) == "object"
    # Objects with the settings of a backend: `torch.backends.mkldnn.conv`.
    return not is_library_class(type(value)) or type(value).__module__.startswith(_BACKENDS)


def _is_users(function: Any) -> bool:
    """Whether a function, or what wraps one, is of the user's."""
    while not isinstance(function, FunctionType):
        inner = (getattr(function, name, None) for name in ("__wrapped__", "func", "fget"))
        function = next((one for one in inner if one is not None), None)
        if function is None:
            return False
    return kind_of_code(function.__code__) == USER
