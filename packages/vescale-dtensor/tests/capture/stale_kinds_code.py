"""Kinds of Python state that lie in code, and behind objects of the standard library."""

import functools
import inspect
import operator
import sys
import threading
import types
from array import array
from collections import OrderedDict
from dataclasses import replace

import torch
from stale_kinds import KINDS, Settings, another, factor, factor_is, in_place, kind, mutated

# --- code


def doubled(x, by=2.0):
    return x * by


def tripled(x):
    return x * 3


def wrapped(function):
    @functools.wraps(function)
    def outer(x):
        return function(x)

    return outer


def closing_over(number):
    return lambda x: x * number


def new_default(function):
    function.__defaults__ = (3.0,)


def own_doubled():
    return types.FunctionType(doubled.__code__, globals(), "own", doubled.__defaults__)


def called(x, value):
    return value(x)


class Shared:
    factor = 2.0

    @staticmethod
    def static(x):
        return x * 2

    @classmethod
    def of_class(cls, x):
        return x * cls.factor

    @property
    def scale(self):
        return self._scale

    def __init__(self):
        self._scale = 2.0

    def method(self, x):
        return x * self._scale

    def __call__(self, x):
        return x * self._scale

    def __getitem__(self, index):
        return self._scale


def own_class(base=Shared):
    """An instance of a class that no other case changes."""
    return type("Own", (base,), {"factor": 2.0, "static": staticmethod(Shared.static)})()


def scale_is(number):
    return mutated(lambda value: setattr(value, "_scale", number))


kind("function", lambda: doubled, lambda v: tripled, called)
kind("lambda", lambda: closing_over(2.0), lambda v: closing_over(3.0), called)
kind(
    "partial",
    lambda: functools.partial(doubled, by=2.0),
    lambda v: functools.partial(doubled, by=3.0),
    called,
)
kind("wrapped function", lambda: wrapped(doubled), lambda v: wrapped(tripled), called)
kind("default of a function", own_doubled, mutated(new_default), called)
kind(
    "bound method",
    lambda: Shared().method,
    mutated(lambda v: setattr(v.__self__, "_scale", 3.0)),
    called,
)
kind("method of an object", Shared, scale_is(3.0), lambda x, v: v.method(x))
kind(
    "replaced method",
    own_class,
    mutated(lambda v: setattr(v, "method", tripled)),
    lambda x, v: v.method(x),
)
kind(
    "static method",
    own_class,
    mutated(lambda v: setattr(type(v), "static", staticmethod(tripled))),
    lambda x, v: v.static(x),
)
in_place("class attribute", own_class, lambda v: setattr(type(v), "factor", 3.0), factor)
another("property", Shared, scale_is(3.0), lambda v: v.scale)
kind(
    "method of a base",
    lambda: own_class(type("Base", (Shared,), {})),
    mutated(lambda v: setattr(type(v).__bases__[0], "method", lambda self, x: x * 3)),
    lambda x, v: v.method(x),
)
kind("callable object", Shared, scale_is(3.0), called)
in_place("hasattr", Shared, lambda v: setattr(v, "extra", 3.0), lambda v: hasattr(v, "extra"))


def inner_local(x, value):
    """An inner function has a local with the name of the attribute."""

    def inner(factor):
        factor = factor * 1.0
        return factor

    return x * inner(value.factor)


kind("local of the same name", Settings, factor_is(3.0), inner_local)


class Tripling(Shared):
    def method(self, x):
        return x * 3


def become_tripling(value):
    value.__class__ = Tripling if type(value) is not Tripling else Shared


def maybe_scaled(x, value):
    return x * getattr(value, "factor", 2.0)


SETTINGS = types.ModuleType("capture_settings")
SETTINGS.factor = 1.0
sys.modules["capture_settings"] = SETTINGS


def change_module(value):
    SETTINGS.factor = SETTINGS.factor % 7 + 1


def importing(x, value):
    from capture_settings import factor

    return x * factor


kind("another class", own_class, mutated(become_tripling), lambda x, v: v.method(x))
kind("attribute of a tensor", lambda: torch.ones(4), factor_is(3.0), maybe_scaled)
kind("import inside", lambda: 0, mutated(change_module), importing)


# --- state behind objects of the standard library


def behind(name, owner, read, change, use):
    """A kind whose value is made from an owner, which is changed."""
    owners = {}

    def make():
        value = read(made := owner())
        owners[id(value)] = value, made
        return value

    def altered(value):
        change(owners[id(value)][1])
        return value

    kind(name, make, altered, use)


def set_flag(event):
    event.clear() if event.is_set() else event.set()


behind(
    "bound method of a dict",
    lambda: {"a": 2.0},
    lambda owner: owner.get,
    lambda owner: owner.update(a=3.0),
    lambda x, v: x * v("a"),
)
behind(
    "view of a dict",
    lambda: {"a": 2.0},
    lambda owner: owner.values(),
    lambda owner: owner.update(b=3.0),
    lambda x, v: x * sum(v),
)
another("attrgetter", lambda: operator.attrgetter("factor"), lambda v: v, lambda v: v(COUNTED))
in_place("event", threading.Event, set_flag, lambda v: v.is_set())
in_place("array", lambda: array("f", [2.0]), lambda v: v.append(3.0), sum)
COUNTED = Settings()
KINDS["attrgetter"] = replace(
    KINDS["attrgetter"],
    change=mutated(lambda v: setattr(COUNTED, "factor", COUNTED.factor % 7 + 1)),
)


# --- attributes that are missing at first: code goes on without them


def number_of(v):
    return v.number


def caught_by_the_caller(x, v):
    try:
        return x * number_of(v)
    except AttributeError:
        return x


def caught_without_a_name(x, v):
    try:
        return x * v.number
    except:  # noqa: E722
        return x


def left(x, v):
    try:
        x = x * v.number
    finally:
        return x  # noqa: B012


def numbered(v):
    v.number = getattr(v, "number", 1.0) + 1
    return v


for _use in (caught_by_the_caller, caught_without_a_name, left):
    _words = _use.__name__.replace("_", " ")
    kind(f"attribute that a function lacks, {_words}", lambda: lambda: None, numbered, _use)
for _what, _make in {
    "OrderedDict": OrderedDict,
    "ExceptionGroup": lambda: ExceptionGroup("two", [KeyError(1)]),
}.items():
    kind(f"attribute that a {_what} lacks", _make, numbered, caught_by_the_caller)
OTHER_MODULE = types.ModuleType("capture_that_lacks")


def imported_if_there(x, v):
    try:
        from capture_that_lacks import number
    except ImportError:
        number = 1.0
    return x * number


def lacking():
    vars(OTHER_MODULE).pop("number", None)
    sys.modules["capture_that_lacks"] = OTHER_MODULE
    return OTHER_MODULE


kind("name to import that a Python module lacks", lacking, numbered, imported_if_there)


def of_an_import(x, v):
    import torch.nn.functional as lib

    try:
        return x * lib.number_that_libraries_lack
    except AttributeError:
        return x


def added(v):
    torch.nn.functional.number_that_libraries_lack = v + 1
    return v + 1


def cleaned():
    vars(torch.nn.functional).pop("number_that_libraries_lack", None)
    return 1.0


kind("name of an import that it lacks", cleaned, added, of_an_import)


def with_signature(v):
    known = getattr(v, "__signature__", inspect.Signature())
    more = inspect.Parameter(f"p{len(known.parameters)}", inspect.Parameter.KEYWORD_ONLY)
    v.__signature__ = known.replace(parameters=[*known.parameters.values(), more])
    return v


another(
    "signature that a function is given",
    lambda: lambda a, b: a,
    with_signature,
    lambda v: len(inspect.signature(v).parameters),
)
