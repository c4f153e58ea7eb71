"""Programs in which a number reaches the function by what Python calls of itself.

Of a special method, the number changes that its closure holds, then the method of the class. Of a
use, the number changes that an object holds.
"""

import bisect
import contextlib
import copy
import functools
import heapq
import itertools
import json
import math
import operator
import re
import string
import struct
import types
import weakref

import numpy
import torch
import torch.nn.functional as F

# What the method gives for a number, and how code comes to it.
METHODS = {
    "__round__": (float, round),
    "__abs__": (float, abs),
    "__neg__": (float, lambda o: -o),
    "__pos__": (float, lambda o: +o),
    "__invert__": (float, lambda o: ~o),
    "__add__": (float, lambda o: o + 1),
    "__radd__": (float, lambda o: sum([o])),
    "__mul__": (float, lambda o: o * 1),
    "__matmul__": (float, lambda o: o @ 1),
    "__truediv__": (float, lambda o: o / 1),
    "__floordiv__": (float, lambda o: o // 1),
    "__mod__": (float, lambda o: o % 1),
    "__divmod__": (float, lambda o: divmod(o, 1)),
    "__pow__": (float, lambda o: o**1),
    "__and__": (float, lambda o: o & 1),
    "__rshift__": (float, lambda o: o >> 1),
    "__trunc__": (int, math.trunc),
    "__ceil__": (int, math.ceil),
    "__int__": (int, int),
    "__complex__": (complex, lambda o: complex(o).real),
    "__hash__": (int, hash),
    "__iter__": (lambda v: iter([v, v]), sum),
    "__reversed__": (lambda v: iter([v]), lambda o: next(reversed(o))),
    "__getitem__": (float, lambda o: o[0]),
    "__getattr__": (float, lambda o: o.anything),
    "__length_hint__": (int, operator.length_hint),
    "__dir__": (lambda v: ["a"] * int(v), lambda o: len(dir(o))),
    "__sizeof__": (int, lambda o: o.__sizeof__()),
    "__repr__": (str, lambda o: float(repr(o))),
    "__str__": (str, lambda o: float(str(o))),
    "__bytes__": (lambda v: b"a" * int(v), lambda o: len(bytes(o))),
    "__lt__": (lambda v: v > 2, lambda o: 2 if o < o else 3),
    "__eq__": (lambda v: v > 2, lambda o: 1 + [7].count(o)),
    "__contains__": (lambda v: v > 2, lambda o: 2 if 5 in o else 3),
}


def of_method(name):
    """A function, and its two changes."""
    given, use = METHODS[name]
    number = 2.0

    def method(self, *others):
        return given(number)

    def in_closure():
        nonlocal number
        number = 3.0

    kind = type("Kind", (), {name: method, "__hash__": method if name == "__hash__" else hash_of})
    one = kind()
    changes = in_closure, lambda: setattr(kind, name, lambda self, *others: given(7.0))
    return (lambda x: x * use(one)), changes


def hash_of(self):
    return 1


def handled(box):
    try:
        if box.v > 2:
            raise KeyError(box.v)
    except KeyError as error:
        return error.args[0]
    return 2.0


def managed(box):
    @contextlib.contextmanager
    def manager():
        yield box.v

    with contextlib.ExitStack() as stack:
        return stack.enter_context(manager())


def dispatched(box):
    @functools.singledispatch
    def number(value):
        return 1.0

    number.register(int)(lambda value: box.v)
    return number(3)


def awaited(box):
    async def number():
        return box.v

    waiting = number()
    try:
        waiting.send(None)
    except StopIteration as stop:
        return stop.value


def of_class(box):
    class Base:
        def __init_subclass__(cls):
            cls.factor = box.v

    class Derived(Base):
        def own(self):
            return self.factor

    return Derived().own()


def named(box):
    class Named:
        def __set_name__(self, owner, name):
            owner.factor = box.v

    return type("Owner", (), {"held": Named()}).factor


def matched(box):
    match box:
        case types.SimpleNamespace(v=2.0):
            return 2.0
        case types.SimpleNamespace(v=other):
            return other * 7


def recursive(box, depth=3):
    return recursive(box, depth - 1) if depth else box.v


def memoized(box):
    @functools.cache
    def number():
        return box.v

    return number() + number()


def in_text(box):
    space = {"box": box}
    return eval("box.v * 2", space)


# Each a factor of the argument.
USES = {
    "map": lambda b: sum(map(lambda i: i * b.v, [1, 2])),
    "filter": lambda b: len(list(filter(lambda i: i < b.v, [1, 2.5, 3.5]))),
    "reduce": lambda b: functools.reduce(lambda one, two: one + b.v, [1, 2]),
    "sorted by key": lambda b: sorted([1, 2, 3], key=lambda i: abs(i - b.v))[0],
    "least by key": lambda b: min([1, 2, 3, 4], key=lambda i: abs(i - b.v)),
    "bisect": lambda b: bisect.bisect([1, 2, 3, 4, 5], b.v),
    "heap": lambda b: heapq.nsmallest(1, [b.v, 9])[0],
    "starmap": lambda b: sum(itertools.starmap(lambda i, j: i * j * b.v, [(1, 2)])),
    "accumulated": lambda b: [*itertools.accumulate([1, 2], lambda i, j: i + j * b.v)][-1],
    "chained": lambda b: sum(itertools.chain([b.v], [1])),
    "zipped": lambda b: sum(i * j for i, j in zip([b.v], [2], strict=True)),
    "generator inside": lambda b: sum(i * b.v for i in range(3)),
    "attrgetter inside": lambda b: operator.attrgetter("b.v")(types.SimpleNamespace(b=b)),
    "itemgetter inside": lambda b: operator.itemgetter("v")(vars(b)),
    "vars": lambda b: sum(value for value in vars(b).values()),
    "keywords": lambda b: (lambda v: v)(**vars(b)),
    "joined dicts": lambda b: ({"v": 0} | vars(b))["v"],
    "setdefault": lambda b: {}.setdefault("a", b.v),
    "__getattribute__": lambda b: object.__getattribute__(b, "v"),
    "getattr, joined": lambda b: getattr(b, "".join(["v"])),
    "getattr, default": lambda b: getattr(b, "nothing", b.v),
    "substituted": lambda b: float(re.sub("a", lambda found: str(b.v), "a")),
    "format_map": lambda b: float("{v}".format_map(vars(b))),
    "template": lambda b: float(string.Template("$v").substitute(vars(b))),
    "digits": lambda b: float(f"{1.23456:.{int(b.v)}f}"),
    "json": lambda b: json.loads(json.dumps(vars(b)))["v"],
    "packed": lambda b: struct.unpack("f", struct.pack("f", b.v))[0],
    "deep copy": lambda b: copy.deepcopy(b).v,
    "vectorized": lambda b: float(numpy.vectorize(lambda i: i * b.v)([1.0])[0]),
    "array inside": lambda b: float(numpy.array([b.v]).sum()),
    "tensor of a list": lambda b: torch.tensor([b.v, 1.0, 2.0, 3.0]),
    "filled": lambda b: torch.full((4,), b.v),
    "default of an inner function": lambda b: (lambda k=b.v: k)(),
    "partial inside": lambda b: functools.partial(lambda i, j: j * b.v, 1)(2),
    "in a set": lambda b: sum(f() for f in {lambda: b.v}),
    "tuple of a class": lambda b: type("T", (tuple,), {"f": lambda self: b.v})((1,)).f(),
    "property of a metaclass": lambda b: (
        type("M", (type,), {"p": property(lambda c: b.v)})("K", (), {}).p
    ),
    "handled": handled,
    "managed": managed,
    "dispatched": dispatched,
    "awaited": awaited,
    "of a class": of_class,
    "named": named,
    "matched": matched,
    "recursive": recursive,
    "memoized": memoized,
    "in text": in_text,
}

# Each of the argument itself.
CALLS = {
    "dropout": lambda x, b: F.dropout(x, 0.1 * b.v),
    "loop": lambda x, b: functools.reduce(lambda y, _: y + 1, range(int(b.v)), x),
    "branch": lambda x, b: torch.where(torch.tensor(b.v > 2), x, -x),
    "equation": lambda x, b: torch.einsum("ij->i" if b.v > 2 else "ij->j", x),
    "autocast": lambda x, b: with_autocast(x, b.v > 2),
    "weak": lambda x, b: x * held(b),
}


def with_autocast(x, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return x @ x.t()


class Held:
    def __init__(self, value):
        self.value = value


def held(box):
    one = Held(box.v)
    return weakref.ref(one)().value


def of_use(name):
    """A function, and its two changes."""
    box = types.SimpleNamespace(v=2.0)
    changes = [lambda number=number: setattr(box, "v", number) for number in (3.0, 4.0)]
    if name in CALLS:
        return (lambda x: CALLS[name](x, box)), changes
    return (lambda x: x * USES[name](box)), changes


PROTOCOLS = {
    **{name: functools.partial(of_method, name) for name in METHODS},
    **{name: functools.partial(of_use, name) for name in (*USES, *CALLS)},
}
