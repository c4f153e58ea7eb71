"""What the code of a captured function names is guarded, to any depth; what it does not is not.

A case makes a function, a change of what it reads, and one of what it does not. Each call is
compared with eager mode: after the first change it is recorded anew, after the second replayed.
"""

import collections
import dataclasses
import enum
import functools
import queue
import types

import pytest
import torch
import vescale_dtensor as vd
from torch import nn

FACTOR, UNREAD, NESTED, LISTED = 2.0, 0, {"deep": [{"factor": 2.0}]}, [1.0, 2.0]


class Mode(enum.Enum):
    DOUBLE = 2.0
    TREBLE = 3.0


@dataclasses.dataclass
class Config:
    factor: float = 2.0
    mode: Mode = Mode.DOUBLE
    dtype: torch.dtype = torch.float32
    parts: list = dataclasses.field(default_factory=lambda: [2.0, {"more": {3.0}}])
    other: int = 0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 2.0


class Model(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.config, self.settings = Config(), types.SimpleNamespace(inner=Slotted())
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.register_buffer("offset", torch.ones(4))
        self.factor, self.unread = 2.0, 0

    def forward(self, x):
        x = self.drop(self.linear(x)) * self.factor * self.scale + self.offset
        x = x * self.config.factor * self.config.mode.value * self.config.parts[0]
        return x.to(self.config.dtype) * self.settings.inner.factor * len(self.config.parts[1])


def helper(x):
    return x * FACTOR


def through_helper(x):
    return helper(x) + NESTED["deep"][0]["factor"] * sum(LISTED)


def with_default(x, factors=(2.0,), *, more=LISTED):
    return x * factors[0] + more[0]


def counted(x):
    return x * len(LISTED)


def doubled(model, given, output):
    return output * 2


def replaced(name, value):
    return lambda model: setattr(model, name, value())


def assign(name, value):
    return lambda function: globals().update({name: value})


CHANGES = {
    "an attribute": replaced("factor", lambda: 3.0),
    "an attribute of a class": lambda model: setattr(Model, "scale", 3.0),
    "an attribute that hides one": replaced("scale", lambda: 5.0),
    "a nested config": lambda model: setattr(model.config, "factor", 3.0),
    "an enum": lambda model: setattr(model.config, "mode", Mode.TREBLE),
    "a dtype": lambda model: setattr(model.config, "dtype", torch.float64),
    "a list": lambda model: model.config.parts.__setitem__(0, 3.0),
    "a set in a dict in a list": lambda model: model.config.parts[1].update(other=1),
    "a slot": lambda model: setattr(model.settings.inner, "factor", 3.0),
    "a whole config": replaced("config", lambda: Config(factor=7.0)),
    "a submodule": replaced("linear", lambda: nn.Linear(4, 4)),
    "a parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "a buffer": replaced("offset", lambda: torch.zeros(4)),
    "a hook": lambda model: model.linear.register_forward_hook(doubled),
    "a train flag": lambda model: model.drop.eval(),
    "what a module of torch reads": lambda model: setattr(model.drop, "p", 1.0),
    "a method": replaced("forward", lambda: lambda x: x * 2),
}
FUNCTIONS = {
    "a global of a helper": (through_helper, assign("FACTOR", 3.0)),
    "a global that is deep": (
        through_helper,
        lambda function: NESTED["deep"][0].update(factor=3.0),
    ),
    "a helper": (through_helper, assign("helper", lambda x: x * 7)),
    "a list that grows": (counted, lambda function: LISTED.append(1.0)),
    "a default": (with_default, lambda function: setattr(function, "__defaults__", ((5.0,),))),
    "a default that is a list": (with_default, lambda function: LISTED.__setitem__(0, 9.0)),
    "code": (counted, lambda function: setattr(function, "__code__", helper.__code__)),
}


@pytest.fixture(autouse=True)
def as_it_was():
    space = {k: globals()[k] for k in ("FACTOR", "helper")}
    yield
    globals().update(space)
    Model.scale = Kept._factor = 2.0
    vars(by_position).clear()
    if "scale" in vars(Inheriting):
        del Inheriting.scale
    NESTED["deep"][0]["factor"], LISTED[:] = 2.0, [1.0, 2.0]


def copied(function):
    """A function of its own, so that changes of it are of one case."""
    made = types.FunctionType(function.__code__, globals(), argdefs=function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def check(function, change, target, unread=lambda target: None):
    captured, x = vd.capture(function), torch.ones(2, 4)

    def same():
        assert torch.equal(captured(x), function(x))

    same(), same()
    assert (len(captured.programs), captured.replays) == (1, 1)
    unread(target), same()
    assert (len(captured.programs), captured.replays) == (1, 2)
    change(target), same()
    assert (len(captured.programs), captured.replays) == (2, 2)
    same()
    assert captured.replays == 3


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_a_model_names(name):
    def unread(model):
        model.unread = model.step = 1

    torch.manual_seed(0)
    model = Model()
    check(model, CHANGES[name], model, unread)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_change_of_what_a_function_names(name):
    function, change = FUNCTIONS[name]
    function = copied(function)
    check(function, change, function, assign("UNREAD", UNREAD + 1))


def test_closures_partials_and_objects():
    factor, config = 2.0, Config()

    def function(x):
        return x * factor * config.factor

    def other(_):
        nonlocal factor
        factor = 3.0

    check(function, other, None)
    check(functools.partial(function), lambda _: setattr(config, "factor", 5.0), None)


class Doubled(type):
    @property
    def factor(cls):
        return cls._factor


class Kept(metaclass=Doubled):
    __match_args__ = ("size",)
    names, _factor = {"width": "size"}, 2.0

    def __init__(self):
        self.size, self.step = FACTOR, 0

    @functools.singledispatchmethod
    def sort(self, x):
        return x

    @sort.register
    def _(self, x: torch.Tensor):
        return x * FACTOR

    def scale(self, x, times):
        return x * FACTOR * times

    twice = functools.partialmethod(scale, times=2)


class Inheriting(Kept):
    pass


class Renaming(Kept):
    def __getattribute__(self, name):
        return super().__getattribute__(Kept.names.get(name, name))


@functools.singledispatch
def sorted_by_type(x):
    return x


@sorted_by_type.register
def _(x: torch.Tensor):
    return x * FACTOR


def by_position(x, kept):
    match kept:
        case Kept(size):
            return x * size


def sets(name, value=3.0):
    return lambda target: setattr(target, name, value)


def indirect():
    """What is named by way of classes of Python: a function of it and x, it, and a change of it."""
    kept, weight = Kept(), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    table = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    factor = assign("FACTOR", 3.0)

    def swap(table):
        one, two = table.pop("a"), table.pop("b")
        table["b"], table["a"] = one, two

    return {
        "a partial method": (lambda x, it: it.twice(x), kept, factor),
        "a method by type": (lambda x, it: it.sort(x), kept, factor),
        "a function by type": (lambda x, it: it(x), sorted_by_type, factor),
        "a class that is called": (lambda x, it: x * it.size * Kept().size, kept, factor),
        "a method that hides one": (
            lambda x, it: it.scale(x, 1),
            Inheriting(),
            lambda it: setattr(Inheriting, "scale", lambda it, x, times: x * 7),
        ),
        "an attribute that is set later": (
            lambda x, it: x * getattr(it, "own", 1.0),
            by_position,
            sets("own"),
        ),
        "a metaclass": (lambda x, it: x * it.factor, Kept, sets("_factor")),
        "an attribute by position": (by_position, kept, sets("size")),
        "a name that is looked up": (lambda x, it: x * it.width, Renaming(), sets("size")),
        "a dict of a class": (
            lambda x, it: x * it["a"],
            collections.UserDict(a=2.0),
            lambda it: it.update(a=3.0),
        ),
        "keys of modules": (lambda x, it: it["a"](x), table, swap),
        "a learning rate": (
            lambda x, it: x * it.param_groups[0]["lr"],
            optimizer,
            lambda it: it.param_groups[0].update(lr=3.0),
        ),
        "a scheduler": (lambda x, it: x * it.get_last_lr()[0], scheduler, sets("_last_lr", [3.0])),
    }


@pytest.mark.parametrize("name", indirect())
def test_a_change_of_what_is_named_indirectly(name):
    body, target, change = indirect()[name]
    check(lambda x: body(x, target), change, target)


class Counted(Slotted):
    __slots__ = ("step",)


def test_what_is_set_and_never_read_is_no_difference():
    model, slotted, kept = Model(), Counted(), Kept()

    def function(x):
        return model(x) * slotted.factor * Kept._factor * kept.size * float("nan")

    captured = vd.capture(function, check=None)
    for number in range(6):
        model.step = slotted.step = kept.step = number
        captured(torch.ones(2, 4))
    assert captured.replays == 5
    by_value = vd.capture(lambda x, scale: x * scale, check=None)
    for _ in range(3):
        by_value(torch.ones(4), float("nan"))
    assert by_value.replays == 2


def test_what_is_equal_is_no_change():
    model = Model()

    def equal(model):
        model.factor = float("2.0")
        model.config.mode = Mode(2.0)

    check(model, CHANGES["an attribute"], model, equal)


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.log, self.aux, self.write = [], None, write

    def forward(self, x):
        y = x * 2
        self.write(self, y)
        return y


def to_attribute(model, y):
    model.aux = y


def to_list(model, y):
    model.log.append(y)


def to_global(model, y):
    global UNREAD
    UNREAD += 1


RATES, QUEUE = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1), queue.Queue()


def to_queue(model, y):
    QUEUE.put(y)


def to_learning_rate(model, y):
    for group in RATES.param_groups:
        group["lr"] *= 0.5


WRITES = (to_attribute, to_list, to_global, to_queue, to_learning_rate)


@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_a_write_is_refused_with_its_line(write):
    captured = vd.capture(Writing(write))
    captured(torch.ones(4))
    with pytest.raises(vd.CaptureError, match=rf"in call after call[\s\S]*{__file__}:\d+"):
        captured(torch.ones(4))


def test_what_is_outside_of_the_contract_is_recorded():
    import random
    import time

    numbers, generator = iter(range(9)), random.Random(0)

    def function(x):
        return x * (next(numbers) + 1) * (time.time() > 0) + 0 * generator.random()

    captured = vd.capture(function, check=None)
    assert torch.equal(captured(torch.ones(4)), torch.ones(4))
    assert torch.equal(captured(torch.ones(4)), torch.ones(4))
    assert captured.replays == 1
