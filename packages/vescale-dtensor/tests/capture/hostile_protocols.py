"""Programs in which a number reaches the function by what Python calls of itself.

Of a special method, the number changes that its closure holds, then the method of the class. Of a
use, the number changes that an object holds.
"""

import contextlib
import copy
import functools
import itertools
import operator
import re
import types
import weakref

import torch
import torch.nn.functional as F

# What the method gives for a number, and how code comes to it.
METHODS = {
    "__abs__": (float, abs),
    "__neg__": (float, lambda o: -o),
    "__add__": (float, lambda o: o + 1),
    "__radd__": (float, lambda o: sum([o])),
    "__int__": (int, int),
    "__complex__": (complex, lambda o: complex(o).real),
    "__hash__": (int, hash),
    "__iter__": (lambda v: iter([v, v]), sum),
    "__getitem__": (float, lambda o: o[0]),
    "__getattr__": (float, lambda o: o.anything),
    "__length_hint__": (int, operator.length_hint),
    "__dir__": (lambda v: ["a"] * int(v), lambda o: len(dir(o))),
    "__repr__": (str, lambda o: float(repr(o))),
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


def awaited(box):
    async def number():
        return box.v

    waiting = number()
    try:
        waiting.send(None)
    except StopIteration as stop:
        return stop.value


def matched(box):
    match box:
        case types.SimpleNamespace(v=2.0):
            return 2.0
        case types.SimpleNamespace(v=other):
            return other * 7


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
    "reduce": lambda b: functools.reduce(lambda one, two: one + b.v, [1, 2]),
    "sorted by key": lambda b: sorted([1, 2, 3], key=lambda i: abs(i - b.v))[0],
    "accumulated": lambda b: [*itertools.accumulate([1, 2], lambda i, j: i + j * b.v)][-1],
    "generator inside": lambda b: sum(i * b.v for i in range(3)),
    "attrgetter inside": lambda b: operator.attrgetter("b.v")(types.SimpleNamespace(b=b)),
    "vars": lambda b: sum(value for value in vars(b).values()),
    "__getattribute__": lambda b: object.__getattribute__(b, "v"),
    "getattr, joined": lambda b: getattr(b, "".join(["v"])),
    "substituted": lambda b: float(re.sub("a", lambda found: str(b.v), "a")),
    "format_map": lambda b: float("{v}".format_map(vars(b))),
    "digits": lambda b: float(f"{1.23456:.{int(b.v)}f}"),
    "deep copy": lambda b: copy.deepcopy(b).v,
    "tensor of a list": lambda b: torch.tensor([b.v, 1.0, 2.0, 3.0]),
    "filled": lambda b: torch.full((4,), b.v),
    "default of an inner function": lambda b: (lambda k=b.v: k)(),
    "in a set": lambda b: sum(f() for f in {lambda: b.v}),
    "handled": handled,
    "managed": managed,
    "awaited": awaited,
    "matched": matched,
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
