"""Guards on Python values that the code of a captured function names.

Python reads a name without telling anybody, so what a function *did* read is not known. What it
could read is: the globals, closures and attributes whose names are in its code, and in the code of
the functions and modules that it refers to. Of these, plain values (numbers, strings, None) are
compared, and of tensors and modules that took part, the places and containers that held them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dis import get_instructions
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from vescale_dtensor._capture.module_guards import HOOKS

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_CONTAINERS = (list, tuple, dict)
# Their state is theirs, and what of it matters to a step is guarded by other means.
_LIBRARIES = ("torch", "vescale_", "numpy", "builtins")
_MOST_OBJECTS = 2000


class NameGuard:
    """What a program's function could read by name when it was recorded. Asked at every call.

    Args:
        function: what was captured.
        modules: all that took part.
        matters: whether a tensor or module took part.
    """

    def __init__(
        self, function: Any, modules: Iterable[nn.Module], matters: Callable[[Any], bool]
    ) -> None:
        found = _Search()
        for start in (function, *modules):
            found.follow(start)
        self._values: list[tuple[dict[str, Any], str]] = []
        self._cells = [c for c in found.cells if type(contents(c)) in _PLAIN]
        self._places: list[Callable[[], Any]] = []
        self._containers: list[Any] = []
        for space, name in found.names():
            self._sort(space.get(name), partial(space.get, name), matters, (space, name))
        for cell in found.cells:
            self._sort(contents(cell), partial(contents, cell), matters, None)
        self._were, self._in_cells = self._now()
        self._types = list(map(type, self._were)), list(map(type, self._in_cells))
        self._held = [look() for look in self._places]
        self._items = [tuple(_items(c)) for c in self._containers]

    def _sort(self, value: Any, look: Callable[[], Any], matters: Any, place: Any) -> None:
        if place is not None and type(value) in _PLAIN:
            self._values.append(place)
        elif isinstance(value, _CONTAINERS) and any(map(matters, _items(value))):
            self._places.append(look)
            self._containers.append(value)
        elif matters(value):
            self._places.append(look)

    def _now(self) -> tuple[list[Any], list[Any]]:
        values = [space.get(name) for space, name in self._values]
        return values, [contents(cell) for cell in self._cells]

    def holds(self) -> bool:
        """Whether all of it still is as it was."""
        values, cells = self._now()
        return (
            # Types first: 1 == True, and to compare with a tensor is an op.
            (list(map(type, values)), list(map(type, cells))) == self._types
            and values == self._were
            and cells == self._in_cells
            and all([look() is value for look, value in zip(self._places, self._held, strict=True)])
            and (not self._containers or all(map(_same, self._containers, self._items)))
        )


class _Search:
    """Everything that code can reach by the names in it."""

    def __init__(self) -> None:
        self.cells: list[Any] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._objects: dict[int, dict[str, Any]] = {}
        self._attributes: set[str] = {"forward"}
        self._stored: set[str] = set()
        self._seen: dict[int, Any] = {}

    def names(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Namespaces, with the names in them that some code reads, and none writes."""
        for space, names in self._globals.values():
            for name in (names & space.keys()) - self._stored:
                yield space, name
        for space in self._objects.values():
            for name in (self._attributes & space.keys()) - self._stored:
                yield space, name
            if "_parameters" in space:
                # Hooks and subclasses, of which there may be more, can read any of its tensors.
                yield from ((space, n) for n, v in space.items() if isinstance(v, torch.Tensor))
                if "forward" not in space:
                    yield space, "forward"  # which may be put there later

    def follow(self, value: Any) -> None:
        """Look into a value that code can get at."""
        while isinstance(value, partial):
            self._follow_all((*value.args, *value.keywords.values()))
            value = value.func
        if isinstance(value, MethodType):
            self.follow(value.__self__)
            value = value.__func__
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value)
        elif isinstance(value, nn.Module) or _is_plain_object(value):
            self._object(value)
        elif isinstance(found := getattr(value, "__wrapped__", None), FunctionType):
            self._function(found)  # a captured function inside

    def _follow_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.follow(value)

    def _function(self, function: FunctionType) -> None:
        self._seen[id(function)] = function
        if str(function.__module__).startswith(_LIBRARIES):
            return
        read = self._code(function.__code__, function.__globals__, True)
        written = self._stored.intersection(function.__code__.co_freevars)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.cells += [cell for name, cell in cells.items() if name not in written]
        self._follow_all([contents(cell) for cell in cells.values()])
        self._follow_all(
            (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        )
        self._follow_all([function.__globals__.get(name) for name in read])

    def _code(self, code: CodeType, space: dict[str, Any], writes: bool) -> set[str]:
        """Note the names in code: those of globals, which are returned, and of attributes."""
        _, names = self._globals.setdefault(id(space), (space, set()))
        read = set()
        for instruction in get_instructions(code):
            what, name = instruction.opname, instruction.argval
            if what in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(name)
            elif what in ("LOAD_ATTR", "LOAD_METHOD"):
                self._attributes.add(name)
            elif what.startswith("STORE_") and what != "STORE_FAST" and writes:
                self._stored.add(name)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                read |= self._code(constant, space, writes)
        names |= read
        return read

    def _object(self, value: Any) -> None:
        self._seen[id(value)] = value
        self._objects[id(value)] = vars(value)
        for kind in type(value).__mro__:
            if kind not in (nn.Module, object) and id(kind) not in self._seen:
                self._seen[id(kind)] = kind
                for name, method in vars(kind).items():
                    method = getattr(method, "fget", method)
                    if isinstance(method, FunctionType):
                        space = method.__globals__
                        if kind.__module__.startswith(_LIBRARIES):
                            space = {}  # what torch's own modules keep there is theirs
                        self._code(method.__code__, space, name == "forward")
        self._follow_all([v for v in vars(value).values() if _is_plain_object(v)])
        for name in HOOKS:
            self._follow_all(list(vars(value).get(name, {}).values()))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            self._objects[id(group)] = group
            self._attributes.update(name for name in group if name != "params")


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of somebody's class, with attributes."""
    odd = (type, ModuleType, torch.Tensor, nn.Module, FunctionType, BuiltinFunctionType, MethodType)
    kind = type(value)
    if issubclass(kind, odd) or kind.__module__.startswith(_LIBRARIES):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _same(container: Any, items: tuple[Any, ...]) -> bool:
    return len(container) == len(items) and all(map(is_, _items(container), items))


def contents(cell: Any) -> Any:
    """What a cell of a closure holds; None if nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
