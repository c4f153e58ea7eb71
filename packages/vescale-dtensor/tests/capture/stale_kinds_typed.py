"""Kinds of state that are taken for another: equal by `==`, or changed beside the contents."""

import enum
import functools
from collections import OrderedDict

import numpy
import torch
from stale_kinds import another, factor, in_place, kind, mutated
from stale_kinds_torch import KINDS as KINDS
from torch import nn

NUMBERS = {int: 1.0, bool: 2.0, float: 3.0}


def by_type(x, value):
    """By the type of the number that is in a container."""
    return x * NUMBERS[type(next(iter(value)))]


def next_type(container):
    """1, True, 1.0: all equal."""

    def change(value):
        (number,) = value
        return container([True if type(number) is int else 1.0])

    return change


for cls in (list, tuple, set, frozenset, dict.fromkeys):
    name = getattr(cls, "__qualname__", str(cls))
    kind(f"1, True or 1.0 in a {name}", lambda cls=cls: cls([1]), next_type(cls), by_type)


def nested(number):
    return frozenset({(number,)})


kind(
    "1, True or 1.0 in a tuple in a frozen set",
    lambda: nested(1),
    lambda v: nested(True if type(next(iter(v))[0]) is int else 1.0),
    lambda x, v: by_type(x, next(iter(v))),
)
in_place(
    "sign of zero in a set",
    lambda: {0.0},
    lambda v: (v.clear(), v.add(-0.0)),
    lambda v: 1 if str(next(iter(v))) == "0.0" else 2,
)
another(
    "end of a range",
    lambda: range(0, 3, 2),
    lambda v: range(0, v.stop + 1 if v.stop == 3 else 3, 2),
    lambda v: v.stop,
)


def other_array(value):
    """An equal array first, which the next change fills."""
    if value.base is None:
        return numpy.array([float(value)]).reshape(())
    value.fill(float(value) + 1)
    return value


another("numpy array of no dims", lambda: numpy.array(2.0), other_array, float)


# --- attributes of what counts as its contents


class OwnTuple(tuple):
    factor = 1.0


class OwnInt(int):
    factor = 1.0


class Color(enum.Enum):
    RED = 1


def raised(value):
    value.factor = getattr(value, "factor", 1.0) + 1


def replaced_by(make):
    """Another object of equal contents with another attribute."""

    def change(value):
        made = make()
        made.factor = value.factor + 1
        return made

    return change


MAKES = {"tuple": lambda: OwnTuple((1, 2)), "number": lambda: OwnInt(2)}
for name, make in MAKES.items():
    in_place(f"attribute of a {name}", make, raised, factor)
    another(f"another {name} with an attribute", make, replaced_by(make), factor)


def with_factor(value):
    value.factor = 1.0
    return value


in_place("attribute of an enum", lambda: with_factor(Color.RED), raised, factor)
in_place("attribute of a partial", lambda: with_factor(functools.partial(float)), raised, factor)


def equal_then_changed(value):
    """An equal partial, whose keywords the next change writes."""
    if value.keywords["by"] == 2.0 and not getattr(value, "old", False):
        made = functools.partial(value.func, **value.keywords)
        made.old = True
        return made
    value.keywords["by"] += 1
    return value


kind(
    "keyword of an equal partial",
    lambda: functools.partial(lambda x, by: x * by, by=2.0),
    equal_then_changed,
    lambda x, v: v(x),
)


# --- dicts that stand behind an object


class OddObject:
    """Its class answers for attributes itself."""

    def __init__(self):
        self.factor = 2.0

    def __getattribute__(self, name):
        return super().__getattribute__(name)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_parameter("shift", nn.Parameter(torch.zeros(()), requires_grad=False))

    def forward(self, x):
        for part in self._modules.values():
            x = part(x)
        return x * self.scale * self.factor + self.shift


class OddModule(Plain):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


class Empty(nn.Module):
    def forward(self, x):
        parts = [*self._parameters.values(), *self._buffers.values()]
        return functools.reduce(torch.mul, parts, x)


def other_namespace(value):
    space = dict(object.__getattribute__(value, "__dict__"))
    space["factor"] += 1
    object.__setattr__(value, "__dict__", space)


def calls(x, module):
    return module(x)


def table(name, **parts):
    """Another dict in place of one that a module keeps its parts or hooks in."""

    def change(module):
        old = vars(module)[name]
        vars(module)[name] = OrderedDict(old, **{k: make(len(old)) for k, make in parts.items()})
        if name == "_buffers":
            vars(module)[name]["scale"] = old["scale"] + 1

    return mutated(change)


def hooked():
    module = Plain()
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    return module


in_place("another namespace of an object", OddObject, other_namespace, factor)
for cls in (Plain, OddModule):
    kind(f"another namespace of a {cls.__name__}", cls, mutated(other_namespace), calls)
kind("another dict of buffers", Plain, table("_buffers"), calls)
kind(
    "another dict of hooks",
    hooked,
    mutated(lambda v: vars(v).update(_forward_hooks=OrderedDict())),
    calls,
)
for part, value in (("parameter", nn.Parameter), ("buffer", lambda t, **_: t)):
    kind(
        f"first {part} of a module",
        Empty,
        mutated(
            lambda v, part=part, value=value: getattr(v, f"register_{part}")(
                f"p{len(v._parameters) + len(v._buffers)}",
                value(torch.full((), 3.0), requires_grad=False),
            )
        ),
        calls,
    )
