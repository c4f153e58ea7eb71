"""Kinds of state that users keep on libraries, in modules, tensors and objects of their own."""

import builtins
import dataclasses
import math
import sys
import typing

import numpy
import torch
import vescale_dtensor as vd
from stale_kinds import Settings, kind, mutated, of_attribute
from stale_kinds_asked import setting
from stale_kinds_world import KINDS as KINDS
from stale_kinds_world import next_factor
from torch import fx, nn
from torch.nn.utils import parametrize, prune

# --- what users keep on libraries, and what they put in its place

KEPT, TABLE = Settings(), {"scale": 1.0}


def kept_there(number):
    KEPT.factor = TABLE["scale"] = number + 1.0


LIBRARIES = {
    "torch.nn": nn,
    "math": math,
    "numpy": numpy,
    "sys": sys,
    "a class of torch": nn.Dropout,
    "tensors": torch.Tensor,
    "DTensors": vd.DTensor,
}
for title, holder in LIBRARIES.items():
    holder.stale_box, holder.stale_table = KEPT, TABLE
    setting(
        f"object kept on {title}", kept_there, lambda x, holder=holder: x * holder.stale_box.factor
    )
    setting(
        f"table kept on {title}",
        kept_there,
        lambda x, holder=holder: x * holder.stale_table["scale"],
    )
builtins.stale_table = TABLE
setting("table among the builtins", kept_there, lambda x: x * stale_table["scale"])  # noqa: F821
setting(
    "property added to DTensors",
    lambda n: setattr(vd.DTensor, "stale_twice", property(lambda self: self * (n + 1))),
    lambda x: x.stale_twice,
)
setting(
    "method added to DTensors",
    lambda n: setattr(vd.DTensor, "stale_times", lambda self: self * (n + 1)),
    lambda x: x.stale_times(),
)
TANH = nn.Tanh()


def replaced(title, owner, name, use):
    """A function of a library that another one stands in for."""
    was = getattr(owner, name)

    def apply(number):
        def times(*args):
            return was(*args) * (number + 1)

        setattr(owner, name, times if number else was)

    setting(f"{title} replaced", apply, use)


replaced("function of torch.special", torch.special, "expit", lambda x: torch.special.expit(x))
replaced("call of all modules", nn.Module, "__call__", lambda x: TANH(x))
replaced("method of tensors", torch.Tensor, "relu", lambda x: x.relu())

# --- modules and tensors


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Scaled(nn.Module):
    factor = 2.0

    def forward(self, weight):
        return weight * self.factor


def parametrized():
    module = linear()
    parametrize.register_parametrization(module, "weight", Scaled())
    return module


def called(x, module):
    return module(x)


def unparametrized(module):
    if parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def maybe_scaled(x, module):
    return x * module.scale if hasattr(module, "scale") else x


kind(
    "number of a parametrization",
    parametrized,
    mutated(lambda v: next_factor(v.parametrizations.weight[0])),
    called,
)
kind("parametrization, removed", parametrized, mutated(unparametrized), called)
kind(
    "pruned parameter",
    linear,
    mutated(lambda v: prune.l1_unstructured(v, "weight", 0.5)),
    called,
)
kind(
    "parameters of a functional call",
    lambda: (nn.Linear(4, 4, bias=False), {"weight": torch.ones(4, 4)}),
    mutated(lambda v: v[1].update(weight=v[1]["weight"] * 2)),
    lambda x, v: torch.func.functional_call(v[0], v[1], (x,)),
)
kind(
    "buffer that is there later",
    linear,
    mutated(lambda v: v.register_buffer("scale", torch.full((4,), 3.0))),
    maybe_scaled,
)
kind("parameter that is None", linear, mutated(lambda v: setattr(v, "bias", None)), called)
kind(
    "forward of one object",
    nn.Tanh,
    mutated(lambda v: setattr(v, "forward", lambda x: x * 3)),
    called,
)
kind(
    "number of names in a state",
    linear,
    mutated(lambda v: v.register_buffer(f"more{len(v.state_dict())}", torch.ones(1))),
    lambda x, v: x * len(v.state_dict()),
)
kind(
    "hook of a state",
    linear,
    mutated(
        lambda v: v.register_state_dict_post_hook(
            lambda module, state, *names: state.update({"more": 1})
        )
    ),
    lambda x, v: x * len(v.state_dict()),
)
kind(
    "view of a parameter whose data are swapped",
    lambda: (lambda module: (module, module.weight.detach()[0]))(linear()),
    mutated(lambda v: setattr(v[0].weight, "data", v[0].weight.data * 2)),
    lambda x, v: v[0](x) * v[1],
)


class Own(torch.Tensor):
    factor = 2.0


kind(
    "class of an own tensor",
    lambda: (setattr(Own, "factor", 2.0), torch.ones(4).as_subclass(Own))[1],
    mutated(lambda v: setattr(Own, "factor", 3.0)),
    of_attribute,
)
TENSORS = {
    "resized": (lambda v: v.resize_(5 - v.numel()).fill_(3), lambda x, v: x * v.sum()),
    "set to another": (lambda v: v.set_(v.clone() * 3), lambda x, v: x * v),
    "of other data": (lambda v: setattr(v, "data", v.data.double() + 1), lambda x, v: x * v),
    "moved in its storage": (
        lambda v: v.set_(v.untyped_storage(), 1, (2,)),
        lambda x, v: x * (1 + v.storage_offset()),
    ),
    "of one more dim": (lambda v: v.unsqueeze_(0), lambda x, v: x * v.dim()),
}
for title, (change, use) in TENSORS.items():
    kind(f"tensor {title}", lambda: torch.ones(4), mutated(change), use)


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


def rewritten(module):
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = (node.args[0], node.args[1] + 1)
    module.recompile()


for title, use in {
    "called": called,
    "interpreted": lambda x, v: fx.Interpreter(v).run(x),
    "printed": lambda x, v: x * len(str(v.graph)),
    "as code": lambda x, v: x * len(v.code),
}.items():
    kind(
        f"graph of a module, {title}",
        lambda: fx.symbolic_trace(Doubling()),
        mutated(rewritten),
        use,
    )

# --- protocols that Python calls by names which no code has


class Mapped:
    count = 2

    def keys(self):
        return [str(number) for number in range(self.count)]

    def __getitem__(self, key):
        return 1.0


KEYS = Mapped.keys
kind(
    "method by which mappings are unpacked",
    lambda: (setattr(Mapped, "keys", KEYS), Mapped())[1],
    mutated(lambda v: setattr(Mapped, "keys", lambda self: [])),
    lambda x, v: x * (1 + len({**v})),
)


class Sent(Settings):
    def send(self, value):
        return self.factor

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration(self.factor)


def given_by(iterator):
    yield (yield from iterator)


kind("value of yield from", Sent, next_factor, lambda x, v: x * next(given_by(v)))


class Sequence(Settings):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index > 3:
            raise IndexError
        return self.factor


kind("own sequence as a tensor", Sequence, next_factor, lambda x, v: x * torch.tensor(v))
for title, use in {
    "__round__": lambda x, v: x * round(v),
    "__trunc__": lambda x, v: x * math.trunc(v),
    "__abs__": lambda x, v: x * abs(v),
    "__neg__": lambda x, v: x * -v,
    "__matmul__": lambda x, v: v @ x,
    "__radd__": lambda x, v: x * (1.0 + v),
}.items():
    numbers = type(
        "Number",
        (Settings,),
        {
            title: (lambda self, *args: args[0] * self.factor)
            if title in ("__matmul__", "__radd__")
            else lambda self, *args: self.factor
        },
    )
    kind(f"{title} of an object", numbers, next_factor, use)


class Pair(typing.NamedTuple):
    scale: float = 2.0


kind(
    "default of a named tuple",
    lambda: (setattr(Pair.__new__, "__defaults__", (2.0,)), Pair)[1],
    mutated(lambda v: setattr(v.__new__, "__defaults__", (3.0,))),
    lambda x, v: x * v().scale,
)


@dataclasses.dataclass
class Derived:
    scale: float = 2.0
    more: typing.ClassVar[float] = 1.0

    def __post_init__(self):
        self.factor = self.scale * self.more


kind(
    "class variable that __post_init__ reads",
    lambda: (setattr(Derived, "more", 1.0), Derived)[1],
    mutated(lambda v: setattr(v, "more", 3.0)),
    lambda x, v: x * v().factor,
)
