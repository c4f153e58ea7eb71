"""Kinds of state that objects compute, keep and forward, and in the layers of containers."""

import array
import collections
import dataclasses
import functools
import struct
import types
import typing
import weakref

import numpy
from stale_kinds import Settings, kind, mutated, of_attribute
from stale_kinds_process import KINDS as KINDS
from torch import nn

# --- objects that compute, keep and forward what they are asked for


@dataclasses.dataclass(slots=True)
class Slotted:
    base: float
    scale: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.scale = self.base * 2


kind(
    "slot set by __post_init__",
    lambda: Slotted(1.0),
    lambda v: dataclasses.replace(v, base=v.base + 1),
    lambda x, v: x * v.scale,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    scale: float = 1.0
    shape: tuple = (2.0, 3.0)


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    table: dict = dataclasses.field(default_factory=dict)


kind(
    "frozen dataclass with slots in another",
    Outer,
    mutated(lambda v: setattr(v, "inner", dataclasses.replace(v.inner, scale=v.inner.scale + 1))),
    lambda x, v: x * v.inner.scale * v.inner.shape[-1],
)
kind(
    "default of a field",
    lambda: dataclasses.make_dataclass("Made", [("scale", float, 1.0)]),
    mutated(lambda v: setattr(v, "scale", v.scale + 1)),
    lambda x, v: x * v().scale,
)


class Cached:
    def __init__(self):
        self.base = 1.0

    @functools.cached_property
    def factor(self):
        return self.base + 1


def recomputed(value):
    value.base += 1
    vars(value).pop("factor", None)


kind("cached property, forgotten", Cached, mutated(recomputed), of_attribute)
kind(
    "cached property, overwritten",
    Cached,
    mutated(lambda v: setattr(v, "factor", getattr(v, "factor", 1.0) + 1)),
    of_attribute,
)


class Clamped:
    """A data descriptor that keeps values itself."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, owner, cls=None):
        return self if owner is None else self.values.get(owner, 1.0)

    def __set__(self, owner, value):
        self.values[owner] = min(value, 9.0)


class Described:
    factor = Clamped()


kind(
    "value that a descriptor keeps",
    Described,
    mutated(lambda v: setattr(v, "factor", v.factor + 1)),
    of_attribute,
)


def with_descriptor(value):
    was = value.factor
    type(value).factor = property(lambda self: was + 1)


kind(
    "descriptor put in place of another",
    lambda: type("Own", (), {"factor": property(lambda self: 1.0)})(),
    mutated(with_descriptor),
    of_attribute,
)


class Forwarding:
    def __init__(self):
        self.inner = Settings(1.0)

    def __getattr__(self, name):
        return getattr(self.inner, name)


kind(
    "attribute that __getattr__ forwards",
    Forwarding,
    mutated(lambda v: setattr(v.inner, "factor", v.inner.factor + 1)),
    of_attribute,
)


class Everything:
    def __init__(self):
        self.table = {"factor": 1.0}

    def __getattribute__(self, name):
        table = object.__getattribute__(self, "table")
        return table[name] if name in table else object.__getattribute__(self, name)


kind(
    "attribute that __getattribute__ looks up",
    Everything,
    mutated(lambda v: v.table.update(factor=v.table["factor"] + 1)),
    of_attribute,
)


class One:
    factor = 1.0


class Two:
    factor = 2.0


def other_bases(value):
    cls = type(value)
    cls.__bases__ = (Two, One) if cls.__bases__[0] is One else (One, Two)


kind(
    "order of bases",
    lambda: type("Own", (One, Two), {})(),
    mutated(other_bases),
    of_attribute,
)


class Operated:
    def __init__(self):
        self.factor = 1.0


def operator_replaced(value):
    before = getattr(type(value), "count", 1.0)
    type(value).count = before + 1
    type(value).__rmul__ = type(value).__mul__ = lambda self, x: x * (before + 1)


kind(
    "operator of a class",
    lambda: type("Own", (), {"__mul__": lambda self, x: x, "__rmul__": lambda self, x: x})(),
    mutated(operator_replaced),
    lambda x, v: v * x,
)
kind(
    "truth of an object",
    lambda: type("Own", (), {"__bool__": lambda self: True, "on": 1})(),
    mutated(lambda v: setattr(type(v), "__bool__", lambda self: False)),
    lambda x, v: x * 2 if v else x,
)


def longer_by_one(cls, count):
    cls.__len__ = lambda self: count


kind(
    "length of an object",
    lambda: type("Own", (), {"__len__": lambda self: 3})(),
    mutated(lambda v: longer_by_one(type(v), len(v) + 1)),
    lambda x, v: x * len(v),
)
kind(
    "whether an object contains another",
    lambda: type("Own", (), {"__contains__": lambda self, item: True})(),
    mutated(lambda v: setattr(type(v), "__contains__", lambda self, item: False)),
    lambda x, v: x * 2 if 3 in v else x,
)
kind(
    "equality of an object",
    lambda: type("Own", (), {"__eq__": lambda self, other: True, "__hash__": None})(),
    mutated(lambda v: setattr(type(v), "__eq__", lambda self, other: False)),
    lambda x, v: x * 2 if v == 3 else x,
)
kind(
    "context manager",
    lambda: type("Own", (), {"scale": 1.0, "__enter__": lambda self: self.scale})(),
    mutated(
        lambda v: (
            setattr(v, "scale", v.scale + 1),
            setattr(type(v), "__exit__", lambda self, *args: None),
        )
    ),
    lambda x, v: entered(x, v) if hasattr(type(v), "__exit__") else x,
)


def entered(x, value):
    with value as scale:
        return x * scale


class Registered:
    known: typing.ClassVar = []

    def __init_subclass__(cls, scale=1.0, **kwargs):
        Registered.known.append(scale)


kind(
    "list on a class, read by super()",
    lambda: type("Below", (Settings,), {"get": lambda self: super(type(self), self).factor})(2.0),
    mutated(lambda v: setattr(v, "factor", v.factor + 1)),
    lambda x, v: x * v.factor,
)

# --- containers

kind(
    "inner dict of a chain",
    lambda: collections.ChainMap({}, {"scale": 1.0}),
    mutated(lambda v: v.maps[1].update(scale=v["scale"] + 1)),
    lambda x, v: x * v["scale"],
)
kind(
    "layer in front of a chain",
    lambda: collections.ChainMap({}, {"scale": 1.0}),
    mutated(lambda v: v.maps.insert(0, {"scale": v["scale"] + 1})),
    lambda x, v: x * v["scale"],
)
kind(
    "user dict",
    lambda: collections.UserDict(scale=1.0),
    mutated(lambda v: v.update(scale=v["scale"] + 1)),
    lambda x, v: x * v["scale"],
)
kind(
    "user list",
    lambda: collections.UserList([1.0]),
    mutated(lambda v: v.append(len(v) + 1.0)),
    lambda x, v: x * v[-1],
)
kind("user string", lambda: collections.UserString("a"), lambda v: v + "a", lambda x, v: x * len(v))
kind(
    "order of an ordered dict",
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    mutated(lambda v: v.move_to_end(next(iter(v)))),
    lambda x, v: x * next(iter(v.values())),
)
kind(
    "last item of an ordered dict",
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    mutated(lambda v: v.move_to_end(next(iter(v)))),
    lambda x, v: x * next(reversed(v.values())),
)
kind(
    "rotated deque",
    lambda: collections.deque([1.0, 2.0, 3.0]),
    mutated(lambda v: v.rotate(1)),
    lambda x, v: x * v[0],
)
kind(
    "counter of words",
    lambda: collections.Counter("ab"),
    mutated(lambda v: v.update("a")),
    lambda x, v: x * v["a"] + v.total(),
)
kind(
    "item of an array in a list",
    lambda: [array.array("d", [1.0])],
    mutated(lambda v: v[0].__setitem__(0, v[0][0] + 1)),
    lambda x, v: x * v[0][0],
)
kind(
    "bytes in a byte array",
    lambda: {"raw": bytearray(b"\x01")},
    mutated(lambda v: v["raw"].__setitem__(0, v["raw"][0] + 1)),
    lambda x, v: x * v["raw"][0],
)
kind(
    "memory view of a byte array",
    lambda: memoryview(bytearray(b"\x01\x02")),
    mutated(lambda v: v.__setitem__(0, v[0] + 1)),
    lambda x, v: x * v[0],
)
kind(
    "packed struct",
    lambda: bytearray(struct.pack("d", 1.0)),
    mutated(lambda v: struct.pack_into("d", v, 0, struct.unpack("d", v)[0] + 1)),
    lambda x, v: x * struct.unpack("d", v)[0],
)
kind(
    "field of a numpy record",
    lambda: numpy.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]),
    mutated(lambda v: v["a"].__iadd__(1.0)),
    lambda x, v: x * float(v["a"][0]),
)
kind(
    "numpy structured scalar",
    lambda: numpy.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")])[0],
    mutated(lambda v: v.__setitem__("a", v["a"] + 1)),
    lambda x, v: x * float(v["a"]),
)
kind("numpy float", lambda: numpy.float32(1.0), lambda v: numpy.float32(v + 1), lambda x, v: x * v)
kind("numpy bool", lambda: numpy.bool_(True), lambda v: ~v, lambda x, v: x * 2 if v else x)
kind(
    "list in a tuple in a dict",
    lambda: {"a": ([1.0], 2.0)},
    mutated(lambda v: v["a"][0].append(len(v["a"][0]) + 1.0)),
    lambda x, v: x * v["a"][0][-1],
)
kind(
    "keys of a nested dict",
    lambda: {"a": {"x": 1}},
    mutated(lambda v: v["a"].update({f"y{len(v['a'])}": 1})),
    lambda x, v: x * len(list(v["a"])),
)
kind(
    "set in an object",
    lambda: types.SimpleNamespace(names={"a"}),
    mutated(lambda v: v.names.add(f"b{len(v.names)}")),
    lambda x, v: x * len(v.names),
)
kind(
    "weak proxy",
    lambda: [Settings(1.0)],
    mutated(lambda v: setattr(v[0], "factor", v[0].factor + 1)),
    lambda x, v: x * weakref.proxy(v[0]).factor,
)
PROXIED = Settings(1.0)
kind(
    "kept weak proxy",
    lambda: (setattr(PROXIED, "factor", 1.0), weakref.proxy(PROXIED))[1],
    mutated(lambda v: setattr(v, "factor", v.factor + 1)),
    of_attribute,
)
kind(
    "weak set",
    lambda: [weakref.WeakSet(), []],
    mutated(lambda v: (v[1].append(nn.Identity()), v[0].add(v[1][-1]))),
    lambda x, v: x * len(v[0]),
)
