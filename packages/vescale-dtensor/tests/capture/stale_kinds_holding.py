"""Kinds of state that objects compute, keep and forward, and in the layers of containers."""

import collections
import functools
import weakref

import numpy
from stale_kinds import Settings, kind, mutated, of_attribute
from stale_kinds_process import KINDS as KINDS
from torch import nn

# --- objects that compute, keep and forward what they are asked for


class Cached:
    def __init__(self):
        self.base = 1.0

    @functools.cached_property
    def factor(self):
        return self.base + 1


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


kind(
    "truth of an object",
    lambda: type("Own", (), {"__bool__": lambda self: True, "on": 1})(),
    mutated(lambda v: setattr(type(v), "__bool__", lambda self: False)),
    lambda x, v: x * 2 if v else x,
)


kind(
    "equality of an object",
    lambda: type("Own", (), {"__eq__": lambda self, other: True, "__hash__": None})(),
    mutated(lambda v: setattr(type(v), "__eq__", lambda self, other: False)),
    lambda x, v: x * 2 if v == 3 else x,
)


# --- containers

kind(
    "inner dict of a chain",
    lambda: collections.ChainMap({}, {"scale": 1.0}),
    mutated(lambda v: v.maps[1].update(scale=v["scale"] + 1)),
    lambda x, v: x * v["scale"],
)
kind(
    "user dict",
    lambda: collections.UserDict(scale=1.0),
    mutated(lambda v: v.update(scale=v["scale"] + 1)),
    lambda x, v: x * v["scale"],
)
kind(
    "order of an ordered dict",
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    mutated(lambda v: v.move_to_end(next(iter(v)))),
    lambda x, v: x * next(iter(v.values())),
)
kind(
    "rotated deque",
    lambda: collections.deque([1.0, 2.0, 3.0]),
    mutated(lambda v: v.rotate(1)),
    lambda x, v: x * v[0],
)
kind(
    "bytes in a byte array",
    lambda: {"raw": bytearray(b"\x01")},
    mutated(lambda v: v["raw"].__setitem__(0, v["raw"][0] + 1)),
    lambda x, v: x * v["raw"][0],
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
kind(
    "list in a tuple in a dict",
    lambda: {"a": ([1.0], 2.0)},
    mutated(lambda v: v["a"][0].append(len(v["a"][0]) + 1.0)),
    lambda x, v: x * v["a"][0][-1],
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
