"""Kinds of state behind objects that are written in C: what they lead to, and what runs."""

import contextvars
import datetime
import enum
import itertools
import operator
import random
import re
import sys
import types
import weakref

import numpy
from stale_kinds import Settings, another, factor, grow, in_place, itself, kind, mutated
from stale_kinds_handed import KINDS as KINDS


def grown_in(get):
    """A change of the factor of the object that `get` finds in a value."""
    return mutated(lambda v: setattr(get(v), "factor", get(v).factor + 1))


def factor_of(get):
    """A use of the factor of the object that `get` finds in a value."""
    return lambda x, v: x * get(v).factor


class Base:
    def __init__(self):
        self.factor = 2.0

    def scale(self):
        return self.factor

    def product(self, number):
        return number * self.factor


class Derived(Base):
    pass


# --- objects in C that lead to others

another(
    "object behind super()",
    lambda: super(Derived, Derived()),
    grown_in(lambda v: v.__self__),
    lambda v: v.scale(),
)


SHARED = Base()


def wrapping(make):
    """What leads to the object SHARED, which begins anew."""
    return lambda: (setattr(SHARED, "factor", 2.0), make())[1]


grown_shared = mutated(lambda v: setattr(SHARED, "factor", SHARED.factor + 1))
another(
    "method in a ufunc",
    wrapping(lambda: numpy.frompyfunc(SHARED.product, 1, 1)),
    grown_shared,
    lambda v: v(2.0),
)
another(
    "weak method", wrapping(lambda: weakref.WeakMethod(SHARED.scale)), grown_shared, lambda v: v()()
)


def own_alias():
    class Own:
        factor = 2.0

    return types.GenericAlias(Own, (int,))


another("class behind a generic alias", own_alias, grown_in(lambda v: v.__origin__), factor)
kind(
    "object in a slice",
    lambda: slice(Settings(), None),
    grown_in(lambda v: v.start),
    factor_of(lambda v: v.start),
)


class Asked:
    def asked(self, box):
        return box.factor


GIVEN = Settings()


def method_caller(make):
    return lambda: (setattr(GIVEN, "factor", 2.0), make())[1]


for title, make in {
    "argument": lambda: operator.methodcaller("asked", GIVEN),
    "keyword": lambda: operator.methodcaller("asked", box=GIVEN),
}.items():
    in_place(
        f"{title} of a method caller",
        method_caller(make),
        lambda v: setattr(GIVEN, "factor", GIVEN.factor + 1),
        lambda v: v(Asked()),
    )


class Zone(datetime.tzinfo):
    factor = 1

    def utcoffset(self, moment):
        return datetime.timedelta(hours=self.factor)


another(
    "own zone of a moment",
    lambda: datetime.datetime(2020, 1, 1, tzinfo=Zone()),
    grown_in(lambda v: v.tzinfo),
    lambda v: v.utcoffset().seconds,
)
in_place(
    "match in a byte array",
    lambda: re.match(b"a+", bytearray(b"aab")),
    lambda v: v.string.__setitem__(1, v.string[1] + 1),
    lambda v: v.group()[1],
)


class Mode(enum.Enum):
    BOX = Base()


kind(
    "object as the value of an enum",
    lambda: (setattr(Mode.BOX.value, "factor", 2.0), Mode.BOX)[1],
    grown_in(lambda v: v.value),
    factor_of(lambda v: v.value),
)


def variable_elsewhere():
    context, variable = contextvars.copy_context(), contextvars.ContextVar("scale")
    context.run(variable.set, 2.0)
    return context, variable


in_place(
    "variable of another context, read",
    variable_elsewhere,
    lambda v: v[0].run(v[1].set, v[0][v[1]] + 1),
    lambda v: v[0][v[1]],
)

# --- what runs


def frame_with_a_box():
    box = Settings()
    return (lambda: box) and sys._getframe()


def raised(box):
    try:
        raise ValueError(box)
    except ValueError as error:
        return error


in_frame = lambda v: v.f_locals["box"]  # noqa: E731
in_traceback = lambda v: v.tb_frame.f_locals["box"]  # noqa: E731
kind("frame", frame_with_a_box, grown_in(in_frame), factor_of(in_frame))
kind(
    "traceback of an error",
    lambda: raised(Settings()),
    grown_in(lambda v: in_traceback(v.__traceback__)),
    factor_of(lambda v: in_traceback(v.__traceback__)),
)


@types.coroutine
def giving():
    number = 2.0
    while True:
        yield number
        number += 1


async def waiting():
    await giving()


def started(coroutine):
    coroutine.send(None)  # one that never ran is warned of
    return coroutine


another("coroutine", lambda: started(waiting()), itself, lambda v: v.send(None))
another("cycle", lambda: itertools.cycle([1.0, 2.0]), itself, next)
another("random instance", lambda: random.Random(0), itself, lambda v: v.random())

# --- what exceptions hold in C


def error_with_cause():
    error = ValueError(1)
    error.__cause__ = KeyError(2.0)
    return error


in_place(
    "__cause__ of an error",
    error_with_cause,
    lambda v: setattr(v, "__cause__", KeyError(3.0)),
    lambda v: v.__cause__.args[0],
)
in_place("errno of an error", lambda: OSError(2, "none"), grow("errno"), lambda v: v.errno)
