"""What is read from outside is guarded: modules, tensors and names; a change records again.

A case makes a `Recorded` of a function, calls it, changes one thing, and calls it again. Every call
is made in eager too and compared; the first one of its kind must record, the same again must not.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from capture_guards import Recorded, linear, on_both, rows, same, spread
from named_cases import named_cases
from torch import nn
from torch.distributed import tensor as torch_tensor
from vescale_dtensor import Replicate, Shard

CASES, case = named_cases()

# --- modules


def hooked(name):
    model = nn.Sequential(linear(), nn.ReLU())
    seen, x = Recorded(model), spread(rows()).requires_grad_() * 1
    seen(x)
    handle = HOOKS[name](model[0])
    try:
        seen(x)
    finally:
        handle.remove()
    seen.again(x)
    assert len(seen.captured.programs) == 2  # the first program serves again


def twice(module, args, result):
    return result * 2


EVERY = nn.modules.module
HOOKS = {
    "forward_hook": lambda m: m.register_forward_hook(twice),
    "forward_hook_with_kwargs": lambda m: m.register_forward_hook(
        lambda m, a, k, r: r * 2, with_kwargs=True
    ),
    "forward_hook_always": lambda m: m.register_forward_hook(twice, always_call=True),
    "forward_pre_hook": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "forward_pre_hook_with_kwargs": lambda m: m.register_forward_pre_hook(
        lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True
    ),
    "global_forward_hook": lambda m: EVERY.register_module_forward_hook(twice),
    "global_forward_pre_hook": lambda m: EVERY.register_module_forward_pre_hook(lambda m, a: None),
}
CASES.update({name: partial(hooked, name) for name in HOOKS})


@case
def one_hook_for_another():
    model = linear()
    seen, x = Recorded(model), spread(rows())
    handle = model.register_forward_hook(twice)
    seen(x)
    handle.remove()
    model.register_forward_hook(lambda m, a, r: r * 3)
    seen(x)


@case
def dicts_taken_out_of_a_module():
    model = nn.Sequential(linear())
    seen, x = Recorded(model), spread(rows())
    seen(x)
    for name in ("_buffers", "training"):
        taken = vars(model[0]).pop(name)
        seen(x)
        vars(model[0])[name] = taken


@case
def identity_of_a_parameter():
    model = linear()
    seen, x = Recorded(model), spread(rows())
    seen(x)
    model.weight = nn.Parameter(spread(rows(3, 4, seed=3), Replicate()))
    seen(x)


@case
def layout_and_dtype_of_a_parameter():
    model = linear()
    seen, x = Recorded(lambda x: F.linear(x.to(model.weight.dtype), model.weight)), spread(rows())
    seen(x)
    model.weight.data = spread(rows(3, 4).double(), Replicate())
    seen(x)
    model.weight.data = spread(rows(6, 4).double(), Shard(0))
    seen(x)


@case
def state_of_a_plain_tensor_from_outside():
    table = torch.ones(4)
    seen, x = Recorded(lambda x: x * table), spread(rows())
    seen(x)
    table.fill_(2.0)
    seen.again(x)
    assert len(seen.captured.programs) == 1
    table.data = torch.ones(1)
    seen(x)
    table.requires_grad_()
    seen(x)


@case
def gradients_that_are_there_or_not():
    model, x = linear(), spread(rows())

    def step(x):
        model(x).sum().backward()

    captured = vd.capture(step)
    captured(x)
    assert len(captured.programs) == 1
    first = model.weight.grad._local_tensor.clone()
    captured(x), captured(x)
    assert len(captured.programs) == 2
    torch.testing.assert_close(model.weight.grad._local_tensor, 3 * first)
    model.zero_grad()
    captured(x)
    assert len(captured.programs) == 2
    torch.testing.assert_close(model.weight.grad._local_tensor, first)


class Counted(nn.Linear):
    """Looks at its parameters as a dict, as code that copies modules does."""

    def forward(self, x):
        return super().forward(x) * len(vars(self)["_parameters"])


@case
def parameters_that_are_put_in_for_a_call():
    """A function may lend other parameters to a module: the guards compare the module's own."""
    model = Counted(4, 3, bias=False)
    own = model.weight

    def lend(weight, x):
        model._parameters["weight"] = weight
        try:
            return model(x)
        finally:
            model._parameters["weight"] = own

    captured, x = vd.capture(lend), spread(rows())
    for seed in range(3):
        weight = spread(rows(3, 4, seed=seed), Replicate())
        same(captured(weight * 2, x), lend(weight * 2, x))
    assert (len(captured.programs), captured.replays) == (1, 2)


# --- names

FACTOR = 2.0
EVERYWHERE = torch_tensor.Replicate()


class NamedShard(torch_tensor.Shard):
    """A placement of torch's with an attribute that code may read."""

    factor = 1.0


ROWS = NamedShard(0)


def scaled(x):
    return x * FACTOR


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
def what_a_hook_reads():
    factor, model = 2.0, linear()
    model.register_forward_hook(lambda m, a, r: r * factor)
    seen, x = Recorded(model), spread(rows())
    seen(x)
    factor = 3.0
    seen(x)


@case
def an_object_in_a_partial():
    owner, x = Settings(2.0), spread(rows())
    seen = Recorded(partial(lambda o, x: x + o.shift, owner))
    seen(x)
    owner.shift = 3.0
    seen(x)


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


@pytest.mark.parametrize("name", CASES)
def test_a_change_records_again(name):
    on_both(CASES[name])
