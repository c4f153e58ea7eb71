"""Kinds of Python state that a captured function may read: how each is made, changed and used.

`make()` gives a value, `change(value)` the value to hold from then on (the same object, if it was
changed in place), `use(x, value)` a tensor that depends on it, `seen(value)` what else must be as
eager leaves it.
"""

import enum
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch


@dataclass(frozen=True)
class Kind:
    """One kind of state."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]
    use: Callable[[Any, Any], Any]
    seen: Callable[[Any], Any] = lambda value: None


KINDS: dict[str, Kind] = {}


def kind(name, make, change, use, seen=lambda value: None):
    KINDS[name] = Kind(make, change, use, seen)


def mutated(function):
    """A change in place."""

    def change(value):
        function(value)
        return value

    return change


def another(name, make, change, read):
    """State of which `change` gives another value, and `read` a number to multiply by."""
    kind(name, make, change, lambda x, value: x * read(value))


def in_place(name, make, write, read):
    """State that is changed in place."""
    another(name, make, mutated(write), read)


def grow(name):
    """What adds one to an attribute."""
    return lambda value: setattr(value, name, getattr(value, name) + 1)


def itself(value):
    return value


def factor(value):
    return value.factor


# --- values


class Mode(enum.Enum):
    SINE = 1
    COSINE = 2


Pair = namedtuple("Pair", "scale shift")

another("float", lambda: 2.0, lambda v: v + 1, itself)
kind("bool", lambda: True, lambda v: not v, lambda x, v: x.sin() if v else x.cos())
kind("string", lambda: "sin", lambda v: "cos", lambda x, v: getattr(x, v)())
kind("None", lambda: None, lambda v: 3.0, lambda x, v: x if v is None else x * v)
another("enum", lambda: Mode.SINE, lambda v: Mode.COSINE, lambda v: v is Mode.SINE)
kind("dtype", lambda: torch.float32, lambda v: torch.float64, lambda x, v: x.to(v))
another("tuple", lambda: (2.0, 3.0), lambda v: (2.0, 4.0), lambda v: v[1])
kind("slice", lambda: slice(0, 1), lambda v: slice(1, 3), lambda x, v: x[:, v].sum())
another("range", lambda: range(2), lambda v: range(3), sum)
kind(
    "named tuple",
    lambda: Pair(2.0, 1.0),
    lambda v: v._replace(shift=3.0),
    lambda x, v: x * v.scale + v.shift,
)
in_place("set", lambda: {1, 2}, lambda v: v.add(3), len)
another("frozen set", lambda: frozenset({1, 2}), lambda v: v | {3}, len)
another("numpy scalar", lambda: numpy.float32(2), lambda v: numpy.float32(3), float)
in_place("numpy array", lambda: numpy.ones(2), lambda v: v.fill(3), lambda v: float(v[0]))
in_place("bytearray", lambda: bytearray(b"a"), lambda v: v.extend(b"b"), len)


# --- containers

in_place("entry of a dict", lambda: {"a": 2.0}, lambda v: v.update(a=3.0), lambda v: v["a"])
in_place(
    "entry of a nested dict",
    lambda: {"model": {"scale": [1.0, 2.0]}},
    lambda v: v["model"]["scale"].__setitem__(1, 5.0),
    lambda v: v["model"]["scale"][1],
)
in_place("default dict", lambda: defaultdict(int, a=2), lambda v: v.update(a=3), lambda v: v["a"])
in_place(
    "ordered dict", lambda: OrderedDict(a=2), lambda v: v.update(b=3), lambda v: sum(v.values())
)
another(
    "read-only view of a dict",
    lambda: types.MappingProxyType({"a": 2}),
    lambda v: types.MappingProxyType({"a": 3}),
    lambda v: v["a"],
)
in_place("entry of a list", lambda: [2.0, 3.0], lambda v: v.__setitem__(0, 4.0), lambda v: v[0])
in_place("appended list", lambda: [2.0], lambda v: v.append(4.0), sum)
in_place("deque", lambda: deque([2.0]), lambda v: v.append(4.0), sum)
another("iterator", lambda: iter(range(2, 99)), lambda v: v, next)


def counting():
    yield from range(2, 99)


another("generator", counting, lambda v: v, next)


# --- objects


@dataclass
class Settings:
    factor: float = 2.0
    inner: Any = None


@dataclass(frozen=True)
class Frozen:
    factor: float = 2.0


@dataclass(slots=True)
class Slotted:
    factor: float = 2.0
    others: list = field(default_factory=list)


class OldSlots:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


def factor_is(number):
    return mutated(lambda value: setattr(value, "factor", number))


another("field of a dataclass", Settings, factor_is(3.0), factor)
another("another dataclass", Settings, lambda v: replace(v, factor=3.0), factor)
another("frozen dataclass", Frozen, lambda v: replace(v, factor=3.0), factor)
another("dataclass with slots", Slotted, factor_is(3.0), factor)
another("object with slots", lambda: OldSlots(2.0), factor_is(3.0), factor)
in_place(
    "nested dataclass",
    lambda: Settings(inner=Settings()),
    lambda v: setattr(v.inner, "factor", 3.0),
    lambda v: v.inner.factor,
)
in_place(
    "list in a dataclass with slots",
    lambda: Slotted(others=[2.0]),
    lambda v: v.others.append(3.0),
    lambda v: sum(v.others),
)
another("simple namespace", lambda: types.SimpleNamespace(factor=2.0), factor_is(3.0), factor)
in_place(
    "tensor in a dataclass",
    lambda: Settings(inner=torch.ones(4)),
    lambda v: setattr(v, "inner", torch.full((4,), 3.0)),
    lambda v: v.inner,
)
another(
    "weak reference",
    lambda: weakref.ref(KEPT.setdefault(0, Settings())),
    lambda v: weakref.ref(KEPT.setdefault(1, Settings(3.0))),
    lambda v: v().factor,
)
KEPT: dict[int, Settings] = {}


def context_variable():
    variable = ContextVar("scale")
    variable.set(2.0)
    return variable


in_place("context variable", context_variable, lambda v: v.set(3.0), lambda v: v.get())
