"""What a step is given, or a function returns, holds tensors of each call, whatever its class.

Named tuples and other containers of classes of their own are made anew at each replay. A function
that is given to a step (a gradient hook) stays that of the recording, so it is refused if it holds
what belongs to one call; so is any other result that holds a tensor.
Which of two equal objects a captured function gets, and gives, is as in eager mode.
"""

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch import nn
from torch.utils._pytree import tree_flatten
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import Replicate

Pair = namedtuple("Pair", "first second")


class OwnList(list):
    pass


class OwnTuple(tuple):
    pass


class Slotted(tuple):
    __slots__ = ()


@torch.library.custom_op("capture_tests::weighted", mutates_args=())
def weighted(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    return sum(t * w for t, w in zip(tensors, weights, strict=True))


MAKES = {
    "named tuple": Pair,
    "list": lambda a, b: OwnList([a, b]),
    "tuple": lambda a, b: OwnTuple((a, b)),
    "tuple with slots": lambda a, b: Slotted((a, b)),
    "result of torch": lambda a, b: torch.return_types.max((a, b)),
}
OPS = {
    "cat": torch.cat,
    "stack": torch.stack,
    "foreach": lambda pair: torch._foreach_add(pair, 1)[1],
    "meshgrid": lambda pair: torch.stack(torch.meshgrid(*(t[:, 0] for t in pair), indexing="ij")),
    "custom op": lambda pair: weighted(pair, OwnTuple((2.0, 3.0))),
    "index": lambda pair: pair[0][OwnTuple((slice(None), slice(0, 2)))] + pair[1][:, :2],
}


def whole(value):
    return value.full_tensor() if isinstance(value, vd.DTensor) else value


def as_eager(function, make):
    captured = vd.capture(function)
    for seed in range(3):
        wanted, found = function(make(seed)), captured(make(seed))
        ones, twos = (tree_flatten(result)[0] for result in (wanted, found))
        assert len(ones) == len(twos)
        for one, two in zip(ones, twos, strict=True):
            assert torch.equal(whole(one), whole(two)), seed
    assert len(captured.programs) == 1


def step_arguments(rank, world_size):
    ops = list(OPS.values())
    for number, make in enumerate(MAKES.values()):
        for op in (ops[number], ops[number + 1]):

            def function(x, make=make, op=op):
                return op(make(x, x * 2))

            as_eager(function, lambda seed: rows(seed=seed))
            as_eager(function, lambda seed: spread(rows(seed=seed)))


def dispatched(x, weight):
    """A Python function that torch's overrides see, as libraries write them."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(dispatched, (x,), x, weight)
    values = list(weight.values()) if isinstance(weight, dict) else list(weight)
    return x * sum(values[1:], values[0])


def dict_arguments(rank, world_size):
    for make in (
        lambda x: OrderedDict(a=x, b=x * 2),
        lambda x: {1: x, True + 1: x * 2},
        lambda x: {"a": x},
        lambda x: Pair(x, x + 1),
    ):
        as_eager(lambda x, make=make: dispatched(x, make(x)), lambda seed: rows(seed=seed))


def returned(rank, world_size):
    for make in (
        Pair,
        lambda a, b: OrderedDict(a=a, b=b),
        lambda a, b: torch.return_types.max((a, b)),
    ):
        as_eager(lambda x, make=make: make(x, x * 2), lambda seed: spread(rows(seed=seed)))


@dataclass(frozen=True)
class Scale:
    by: float = 2.0


class Hooked(nn.Module):
    """A hook that reads what was there before the call, and a value that follows from it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.by = Scale()

    def scaled(self, gradient):
        return gradient * self.scale * self.by.by

    def forward(self, x):
        hidden, factor = x * 1, self.by.by + 1
        hidden.register_hook(self.scaled)
        hidden.register_hook(lambda gradient: gradient * factor)
        return hidden.sum()


def hooks_that_replays_share(rank, world_size):
    model = Hooked()
    captured = vd.capture(model)
    for step in range(4):
        model.scale.fill_(step + 1)
        x, twin = (spread(rows(seed=step)).requires_grad_() for _ in range(2))
        captured(x).backward(), model(twin).backward()
        assert torch.equal(x.grad.full_tensor(), twin.grad.full_tensor())
    assert len(captured.programs) == 1


CASES = [step_arguments, dict_arguments, returned, hooks_that_replays_share]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_tensors_of_each_call(case):
    run(case, 2)


def hook_of(make):
    """A function that hooks a gradient with what `make` makes of a tensor of the call."""

    def function(x):
        hidden = x * torch.ones(4, requires_grad=True)
        hidden.register_hook(make(x.detach().sum()))
        return hidden.sum()

    return function


def counting(total):
    calls = 0

    def hook(gradient):
        nonlocal calls
        calls += 1
        return gradient * calls

    return hook


def logging(total):
    log = []
    return lambda gradient: log.append(0) or gradient * len(log)


class Times:
    def __init__(self, by):
        self.by = by

    def __call__(self, gradient):
        return gradient * self.by


HOOKS = {
    "closure": lambda total: lambda gradient: gradient * total,
    "default": lambda total: lambda gradient, by=total: gradient * by,
    "partial": lambda total: functools.partial(torch.mul, total),
    "method": lambda total: Times(total).__call__,
    "object": Times,
    "inner function": lambda total: functools.wraps(len)(lambda g: (lambda: g * total)()),
    "variable that it assigns": counting,
    "list": logging,
}


def numbered(value, number):
    value.number = number
    return value


RESULTS = {
    "tuple": lambda x: OwnTuple((x, x)),
    "list": lambda x: OwnList([x, x]),
    "exception": ValueError,
    "frozen set": lambda x: frozenset([x]),
    "slice": lambda x: slice(x, x),
    "function": lambda x: lambda: x,
    "default": lambda x: lambda y=x: y,
    "class": lambda x: type("Own", (), {"held": x}),
    "attribute": lambda x: numbered(OwnTuple(), x),
    "weak reference": lambda x: __import__("weakref").ref(x),
}


@pytest.mark.parametrize("name", sorted(HOOKS))
@on_ranks(2)
def test_hooks_that_hold_what_belongs_to_one_call_are_refused(name):
    for make in (lambda: rows(), lambda: spread(rows(), Replicate())):
        captured = vd.capture(hook_of(HOOKS[name]))
        with pytest.raises(vd.CaptureError, match="replays would keep the first"):
            [captured(make()) for _ in range(2)]


@pytest.mark.parametrize("name", sorted(RESULTS))
@on_ranks(2)
def test_results_that_hold_what_belongs_to_one_call_are_refused(name):
    captured = vd.capture(RESULTS[name])
    with pytest.raises(vd.CaptureError, match="is returned, of which each call"):
        [captured(spread(rows())) for _ in range(2)]


HELD = [2.0]


@on_ranks(2)
def test_lists_count_by_contents_where_no_code_asks():
    captured = vd.capture(lambda x, items: x * items[0] + HELD[0])
    for items in (HELD, [2.0], HELD, [2.0]):
        assert torch.equal(captured(spread(rows()), items).full_tensor(), rows() * 2 + 2)
    assert len(captured.programs) == 1


@on_ranks(2)
def test_a_tensor_that_is_returned_twice_is_one():
    def function(x):
        y, plain = x * 2, x.to_local() * 3
        return y, {"again": y}, plain, [plain]

    captured = vd.capture(function)
    for _ in range(3):
        one, two, three, four = captured(spread(rows()))
        assert one is two["again"]
        assert three is four[0]
        assert torch.equal(one.full_tensor(), rows() * 2)
        assert torch.equal(three, spread(rows()).to_local() * 3)
    assert len(captured.programs) == 1
