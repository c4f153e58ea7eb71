"""What the code of a captured function reads by name is guarded: values, and holders of tensors.

Each case changes one such thing, after which the function is recorded again and gives what it
gives without capture.
"""

from functools import partial

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import Recorded, linear, rows, same, spread
from torch import nn
from torch.distributed import tensor as torch_tensor
from vescale_comm.testing import run
from vescale_dtensor import Replicate

CASES = {}
FACTOR = 2.0
EVERYWHERE = torch_tensor.Replicate()


class NamedShard(torch_tensor.Shard):
    """A placement of torch's with an attribute that code may read."""

    factor = 1.0


ROWS = NamedShard(0)


def case(function):
    CASES[function.__name__] = function
    return function


def scaled(x):
    return x * FACTOR


def whole(seed):
    return spread(rows(5, 4, seed=seed), Replicate())


class Scaled(nn.Module):
    """A module with a number, and an object with another."""

    def __init__(self):
        super().__init__()
        self.factor, self.settings = 2.0, Settings(3.0)

    def forward(self, x):
        return x * self.factor + self.settings.shift


class Settings:
    """An object with a number."""

    def __init__(self, shift):
        self.shift = shift
        self.table = None

    def shifted(self, x):
        return x + self.shift


@case
def a_global():
    global FACTOR
    seen, x = Recorded(lambda x: scaled(x) + 1), spread(rows())
    seen(x)
    FACTOR = 3.0
    seen(x)
    FACTOR = 2.0
    seen.again(x)


@case
def a_closure():
    factor = 2.0

    def closed(x):
        return x * factor

    seen, x = Recorded(lambda x: closed(x) + 1), spread(rows())
    seen(x)
    factor = 3.0
    seen(x)
    factor = True
    seen(x)
    factor = 1.0
    seen(x)


@case
def none_and_a_tensor():
    shift = None

    def closed(x):
        return x if shift is None else x + shift

    seen, x = Recorded(closed), spread(rows())
    seen(x)
    shift = torch.ones(4)
    seen(x)


@case
def an_attribute_of_a_module():
    model, x = Scaled(), spread(rows())
    seen = Recorded(model)
    seen(x)
    model.factor = 5.0
    seen(x)
    model.settings.shift = 7.0
    seen(x)


@case
def a_number_of_dropout():
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.25)), spread(rows())
    seen = Recorded(model)
    seen(x)
    model[1].p = 0.75
    seen(x)


@case
def the_forward_of_a_module():
    model, x = Scaled(), spread(rows())
    seen = Recorded(lambda x: model(x))
    seen(x)
    model.forward = lambda x: x * 9
    seen(x)


@case
def what_a_hook_reads():
    factor, model = 2.0, linear()
    model.register_forward_hook(lambda m, a, r: r * factor)
    seen, x = Recorded(model), spread(rows())
    seen(x)
    factor = 3.0
    seen(x)


@case
def an_object_that_owns_the_function():
    owner, x = Settings(2.0), spread(rows())
    seen = Recorded(owner.shifted)
    seen(x)
    owner.shift = 3.0
    seen(x)


@case
def an_object_in_a_partial():
    owner, x = Settings(2.0), spread(rows())
    seen = Recorded(partial(lambda o, x: x + o.shift, owner))
    seen(x)
    owner.shift = 3.0
    seen(x)


@case
def an_object_that_is_an_argument():
    owner, x = Settings(2.0), spread(rows())
    seen = Recorded(lambda x, o: x + o.shift)
    seen(x, owner)
    owner.shift = 3.0
    seen(x, owner)


@case
def a_set_that_is_an_argument():
    found, x = {1}, spread(rows())
    seen = Recorded(lambda x, s: x * len(s))
    seen(x, found)
    found.add(2)
    seen(x, found)


@case
def a_tensor_on_an_object():
    owner, x = Settings(2.0), spread(rows())
    owner.table = whole(1)
    seen = Recorded(lambda x: x + owner.table)
    seen(x)
    owner.table = whole(2)
    seen(x)


@case
def a_list_of_tensors():
    held, x = [whole(1), whole(2)], spread(rows())

    def total(x):
        for tensor in held:
            x = x + tensor
        return x

    seen = Recorded(total)
    seen(x)
    held.append(whole(3))
    seen(x)
    held[0] = whole(4)
    seen(x)


@case
def a_dict_of_tensors():
    held, x = {"a": whole(1)}, spread(rows())
    seen = Recorded(lambda x: x + held["a"])
    seen(x)
    held["a"] = whole(2)
    seen(x)


@case
def a_list_of_modules():
    layers, x = [linear()], spread(rows())

    def through(x):
        outputs = [layer(x) for layer in layers]
        return sum(outputs[1:], outputs[0])

    seen = Recorded(through)
    seen(x)
    layers.append(linear())
    seen(x)


@case
def a_learning_rate():
    models = linear(), linear()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step_of(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        return step

    eager, captured = (step_of(*pair) for pair in zip(models, optimizers, strict=True))
    captured, x = vd.capture(captured), spread(rows())
    for rate in (0.1, 0.1, 0.01, 0.01, 0.1):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        eager(x), captured(x)
        same(list(models[0].parameters()), list(models[1].parameters()))


@case
def what_the_function_counts_itself():
    """With permission, that is its own side effect, which happens once."""
    count = 0

    def counted(x):
        nonlocal count
        count += 1
        return x * 2

    captured, x = vd.capture(counted, unguarded=["count"]), spread(rows())
    for _ in range(3):
        captured(x)
    assert (count, len(captured.programs)) == (1, 1)
    count = 5
    captured(x)
    assert len(captured.programs) == 1


@case
def a_name_of_something_else():
    """A global that only has the name of an attribute is not read."""
    global step
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    captured, x = vd.capture(train), spread(rows())
    for step in range(6):  # noqa: B007
        captured(x)
    assert len(captured.programs) <= 2


step = 0


@case
def placements_of_torch():
    """Those of torch count as constants, those of a user's class with their attributes."""
    global EVERYWHERE
    seen, x = Recorded(lambda x: x.redistribute(placements=[EVERYWHERE]) * 2), spread(rows())
    seen(x)
    EVERYWHERE = torch_tensor.Shard(1)
    seen(x)
    EVERYWHERE = torch_tensor.Replicate()
    seen.again(x)

    def factor(x):
        return x.redistribute(placements=[torch_tensor.Shard(ROWS.dim)]) * ROWS.factor

    seen = Recorded(factor)
    seen(x)
    ROWS.factor = 3.0
    seen(x)
    del ROWS.factor


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_change_records_again(name):
    run(check, 2, name)


def check(rank, world_size, name):
    CASES[name]()
