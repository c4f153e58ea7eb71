"""Kinds of state that objects compute, keep and forward, and in the layers of containers."""

import collections
import functools
import weakref
from collections import deque

import numpy
from stale_kinds import Settings, factor, grow, in_place
from stale_kinds_process import KINDS as KINDS
from torch import nn

# --- objects that compute, keep and forward what they are asked for


class Cached:
    def __init__(self):
        self.base = 1.0

    @functools.cached_property
    def factor(self):
        return self.base + 1


in_place(
    "cached property, overwritten",
    Cached,
    lambda v: setattr(v, "factor", getattr(v, "factor", 1.0) + 1),
    factor,
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


in_place("value that a descriptor keeps", Described, grow("factor"), factor)


class Forwarding:
    def __init__(self):
        self.inner = Settings(1.0)

    def __getattr__(self, name):
        return getattr(self.inner, name)


in_place(
    "attribute that __getattr__ forwards",
    Forwarding,
    lambda v: setattr(v.inner, "factor", v.inner.factor + 1),
    factor,
)


class One:
    factor = 1.0


class Two:
    factor = 2.0


def other_bases(value):
    cls = type(value)
    cls.__bases__ = (Two, One) if cls.__bases__[0] is One else (One, Two)


in_place("order of bases", lambda: type("Own", (One, Two), {})(), other_bases, factor)


in_place(
    "truth of an object",
    lambda: type("Own", (), {"__bool__": lambda self: True, "on": 1})(),
    lambda v: setattr(type(v), "__bool__", lambda self: False),
    lambda v: 2 if v else 1,
)


in_place(
    "equality of an object",
    lambda: type("Own", (), {"__eq__": lambda self, other: True, "__hash__": None})(),
    lambda v: setattr(type(v), "__eq__", lambda self, other: False),
    lambda v: v == 3,
)


# --- containers

in_place(
    "inner dict of a chain",
    lambda: collections.ChainMap({}, {"scale": 1.0}),
    lambda v: v.maps[1].update(scale=v["scale"] + 1),
    lambda v: v["scale"],
)
in_place(
    "user dict",
    lambda: collections.UserDict(scale=1.0),
    lambda v: v.update(scale=v["scale"] + 1),
    lambda v: v["scale"],
)
in_place(
    "order of an ordered dict",
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    lambda v: v.move_to_end(next(iter(v))),
    lambda v: next(iter(v.values())),
)
in_place("rotated deque", lambda: deque([1.0, 2.0, 3.0]), lambda v: v.rotate(1), lambda v: v[0])
in_place(
    "bytes in a byte array",
    lambda: {"raw": bytearray(b"\x01")},
    lambda v: v["raw"].__setitem__(0, v["raw"][0] + 1),
    lambda v: v["raw"][0],
)
in_place(
    "field of a numpy record",
    lambda: numpy.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]),
    lambda v: v["a"].__iadd__(1.0),
    lambda v: float(v["a"][0]),
)
in_place(
    "numpy structured scalar",
    lambda: numpy.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")])[0],
    lambda v: v.__setitem__("a", v["a"] + 1),
    lambda v: float(v["a"]),
)
in_place(
    "list in a tuple in a dict",
    lambda: {"a": ([1.0], 2.0)},
    lambda v: v["a"][0].append(len(v["a"][0]) + 1.0),
    lambda v: v["a"][0][-1],
)
PROXIED = Settings(1.0)
in_place(
    "kept weak proxy",
    lambda: (setattr(PROXIED, "factor", 1.0), weakref.proxy(PROXIED))[1],
    grow("factor"),
    factor,
)
in_place(
    "weak set",
    lambda: [weakref.WeakSet(), []],
    lambda v: (v[1].append(nn.Identity()), v[0].add(v[1][-1])),
    lambda v: len(v[0]),
)
