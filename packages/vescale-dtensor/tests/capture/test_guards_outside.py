"""Modules and tensors from outside are guarded: changing them records another program.

A case makes a `Recorded` of a function, calls it, changes one thing, and calls it again. Every call
is made in eager too and compared; the first one of its kind must record, the same again must not.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from capture_guards import Recorded, line, linear, rows, same, spread
from torch import nn
from vescale_comm.testing import run
from vescale_dtensor import Replicate, Shard

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# --- modules


@case
def train_flag():
    model = nn.Sequential(linear(), nn.Sequential(nn.Dropout(0.5)))
    seen, x = Recorded(model), spread(rows())
    seen(x)
    model[1][0].eval()
    seen(x)


def hook_case(register):
    def hooked():
        model = nn.Sequential(linear(), nn.ReLU())
        seen, x = Recorded(model), spread(rows()).requires_grad_() * 1
        seen(x)
        handle = register(model[0])
        try:
            seen(x)
        finally:
            handle.remove()
        seen.again(x)
        assert len(seen.captured.programs) == 2  # the first program serves again

    return hooked


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
CASES.update({name: hook_case(register) for name, register in HOOKS.items()})


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
def identity_of_a_buffer():
    model = vd.distribute_module(nn.BatchNorm1d(4, affine=False).eval(), line())
    seen, x = Recorded(model), spread(rows(), Replicate())
    seen(x)
    model.running_mean = spread(torch.ones(4), Replicate())
    seen(x)


@case
def identity_of_a_submodule():
    model = nn.Sequential(linear(), nn.ReLU())
    seen, x = Recorded(model), spread(rows())
    seen(x)
    model[1] = nn.Tanh()
    seen(x)


@case
def a_module_inside_of_a_function():
    model = nn.Sequential(nn.Sequential(linear(), nn.Dropout(0.5)))
    seen, x = Recorded(lambda x: model[0](x) * 2), spread(rows())
    seen(x)
    model.eval()
    seen(x)


@case
def requires_grad_of_a_parameter():
    model = linear()
    seen, x = Recorded(model), spread(rows())
    seen(x)
    model.weight.requires_grad_(False)
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
def identity_of_a_tensor_in_a_closure():
    held = spread(rows(), Replicate())

    def closed(x):
        return x + held

    seen, x = Recorded(closed), spread(rows())
    seen(x)
    held = spread(rows(seed=5), Replicate())
    seen(x)


@case
def identity_of_a_global_tensor():
    global TABLE
    TABLE = torch.ones(4)
    seen, x = Recorded(of_table), spread(rows())
    seen(x)
    TABLE = torch.full((4,), 3.0)
    seen(x)


TABLE = None


def of_table(x):
    return x * TABLE


@case
def identity_of_a_tensor_on_a_module():
    model = linear()
    model.table = torch.ones(3)
    model.register_forward_hook(lambda m, a, r: r * m.table)
    seen, x = Recorded(model), spread(rows())
    seen(x)
    model.table = torch.full((3,), 3.0)
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


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_change_records_again(name):
    run(check, 2, name)


def check(rank, world_size, name):
    CASES[name]()
