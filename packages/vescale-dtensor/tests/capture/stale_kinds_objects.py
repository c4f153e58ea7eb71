"""Kinds of state in parts of objects that code seldom asks for: names, texts, tables in C."""

import collections
import enum
import functools
import types
import warnings
import weakref

import numpy
import torch
from stale_kinds import another, grow, in_place, kind, mutated
from stale_kinds_replaced import KINDS as KINDS
from torch import nn


def longer(name):
    """A change that adds a letter to an attribute."""
    return mutated(lambda value: setattr(value, name, getattr(value, name) + "a"))


def length_of(name):
    return lambda x, value: x * len(getattr(value, name))


def function_of_its_own():
    code = (lambda a=1.0: a).__code__
    made = types.FunctionType(code, globals(), "made", (1.0,))
    made.__doc__, made.__annotations__ = "text", {"a": float}
    return made


def own_class(**attributes):
    return type("Own", (), attributes)


# --- functions and classes

for name in ("__name__", "__doc__"):
    kind(f"{name} of a function", function_of_its_own, longer(name), length_of(name))
    make = functools.partial(own_class, __doc__="text")
    kind(f"{name} of a class", make, longer(name), length_of(name))


in_place(
    "function by the type of its argument",
    lambda: functools.singledispatch(lambda value: 1.0),
    lambda v: v.register(float)(lambda other: 5.0),
    lambda v: v(2.0),
)


class Descriptor:
    def __init__(self):
        self.number = 2.0

    def __get__(self, owner, cls=None):
        return self.number


def raised_number(value):
    vars(type(value))["read"].number += 1


in_place(
    "number of a descriptor",
    lambda: own_class(read=Descriptor())(),
    raised_number,
    lambda v: v.read,
)


class Meta(type):
    def __call__(cls):
        made = super().__call__()
        made.factor = cls.scale
        return made


in_place(
    "__call__ of a metaclass",
    lambda: Meta("Made", (), {"scale": 2.0}),
    grow("scale"),
    lambda v: v().factor,
)
# --- containers


class Missing(dict):
    number = 2.0

    def __missing__(self, name):
        return self.number


in_place("__missing__ of a dict", Missing, grow("number"), lambda v: v["a"])


def other_factory(value):
    number = value.default_factory()
    value.clear()
    value.default_factory = lambda: number + 1


in_place(
    "factory of a default dict",
    lambda: collections.defaultdict(lambda: 2.0),
    other_factory,
    lambda v: v.default_factory(),
)
in_place(
    "order of a dict",
    lambda: {"a": 2.0, "b": 3.0},
    lambda v: v.update(a=v.pop("a")) if next(iter(v)) == "a" else v.update(b=v.pop("b")),
    lambda v: next(iter(v.values())),
)
another(
    "longest length of a deque",
    lambda: collections.deque([1.0], 2),
    lambda v: collections.deque(v, v.maxlen + 1),
    lambda v: v.maxlen,
)
in_place(
    "one object in two places",
    lambda: [[1], [1]],
    lambda v: v.__setitem__(1, v[0] if v[1] is not v[0] else [1]),
    lambda v: v[0] is v[1],
)
HELD = own_class()
in_place(
    "dict by weak keys",
    lambda: weakref.WeakKeyDictionary({HELD: 2.0}),
    lambda v: v.update({HELD: v[HELD] + 1}),
    lambda v: v[HELD],
)
in_place(
    "value of an enum",
    lambda: enum.Enum("Own", "A B"),
    lambda v: setattr(v.A, "_value_", v.A.value + 1),
    lambda v: v["A"].value,
)
kind(
    "number or enum",
    lambda: enum.IntEnum("Own", "A B").A,
    lambda v: int(v) + 1,
    lambda x, v: x * 2 if isinstance(v, enum.Enum) else x * v,
)
kind(
    "not a number",
    lambda: float("nan"),
    lambda v: 2.0 if v != v else float("nan"),
    lambda x, v: x * 3 if v != v else x * v,
)


def remembering():
    number = [2.0]
    found = functools.lru_cache(lambda name: number[0])
    found.number = number
    return found


in_place("hits of a cache", remembering, lambda v: v(1), lambda v: v.cache_info()[0])

# --- arrays and tensors

in_place(
    "array behind a view",
    lambda: numpy.ones(4)[1:3],
    lambda v: v.base.__setitem__(0, v.base[0] + 1),
    lambda v: float(v.base[0]),
)
in_place(
    "whether an array can be written",
    lambda: numpy.ones(2),
    lambda v: v.setflags(write=not v.flags.writeable),
    lambda v: v.flags.writeable,
)
in_place(
    "mask of an array",
    lambda: numpy.ma.array([1.0, 2.0], mask=[0, 0]),
    lambda v: v.mask.__setitem__(0, not v.mask[0]),
    lambda v: float(v.sum()),
)
in_place(
    "text of a tensor by str", lambda: torch.ones(2), lambda v: v.mul_(1e3), lambda v: len(str(v))
)
kind(
    "strides of a parameter",
    lambda: nn.Parameter(torch.arange(16.0).view(4, 4)),
    mutated(lambda v: setattr(v, "data", v.data.t())),
    lambda x, v: x.to_local() @ v,
)
kind(
    "train flag of a module inside",
    lambda: nn.Sequential(nn.Sequential(nn.Dropout(1.0))),
    mutated(lambda v: v[0][0].train(not v[0][0].training)),
    lambda x, v: v(x),
)


def hooked(name, hook):
    def change(module):
        hooks = getattr(module[0][0], name)
        hooks[len(hooks)] = hook

    return mutated(change)


HOOKS = {
    "_forward_hooks": lambda module, inputs, result: result * 2,
    "_forward_pre_hooks": lambda module, inputs: (inputs[0] * 2,),
    "_backward_hooks": lambda module, inputs, results: (inputs[0] * 2,),
    "_backward_pre_hooks": lambda module, results: (results[0] * 2,),
}


def differentiated(x, module):
    x = x.to_local().detach().requires_grad_()
    y = module(x)
    y.sum().backward()
    return y, x.grad


for name, hook in HOOKS.items():
    kind(
        f"written straight into {name}",
        lambda: nn.Sequential(nn.Sequential(nn.Tanh())),
        hooked(name, hook),
        differentiated,
    )


def scripted():
    with warnings.catch_warnings(action="ignore"):  # of its deprecation
        return torch.jit.script(nn.Linear(4, 4))


kind("scripted module", scripted, lambda v: v, lambda x, v: v(x))
