"""`checkpoint(use_reentrant=True)` of DTensors gives one device's values, masks and gradients.

What torch refuses on one device (gradients that are asked for by name) is refused in its words, and
so is a hook on the node of a checkpoint, which only the engine would call. On dp=2 x tp=2.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from one_device import Place, check
from torch import nn
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks, run
from vescale_dtensor import InterleavedShard, Partial, Replicate, Shard

X = torch.linspace(-1, 1, 20).reshape(5, 4)
W = torch.linspace(-1, 2, 16).reshape(4, 4)


def again(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def block(w):
    return lambda x: x + F.linear(x.sin(), w).tanh()


class Several(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x, y, scale, name=None):
        return x @ self.w * scale, (x * y).cos(), x.argmax(1)


def several(x, w, used):
    found = again(Several(w), x, x * 2, 3.0, None)
    return sum(found[i].square().sum() for i in used)


class Product(torch.autograd.Function):
    """Two results of several inputs, one of which wants no gradient and one is no tensor."""

    @staticmethod
    def forward(ctx, scale, x, fixed, y):
        ctx.save_for_backward(x, fixed, y)
        ctx.scale = scale
        return x * y * fixed * scale, x + y

    @staticmethod
    def backward(ctx, first, second):
        x, fixed, y = ctx.saved_tensors
        first = first * fixed * ctx.scale
        return None, first * y + second, None, first * x + second


def product(x, y):
    return Product.apply(2.0, x, x.detach().cos(), y)


def mixed(x, w):
    first, second = product(x, x * 2)
    found = again(lambda a, b: block(w)(a) + b.sin(), first, second)
    return product(again(torch.sin, found), found)[0]


PROGRAMS = {
    "behind a Function": lambda x, w: again(block(w), product(x, x.cos())[0]),
    "behind a Function of a Function": lambda x, w: again(
        block(w), product(*product(x, x.cos()))[1]
    ),
    "before a Function": lambda x, w: product(again(block(w), x), x)[1],
    "between Functions": mixed,
    "one": lambda x, w: again(block(w), x),
    "before another op": lambda x, w: again(block(w), x) * x,
    "a chain": lambda x, w: again(block(w), again(block(w), again(block(w), x))),
    "a chain with ops between": lambda x, w: again(block(w), again(block(w), x).cos()),
    "parameters as arguments": lambda x, w: again(F.linear, x, w),
    "an operand twice": lambda x, w: again(lambda a, b: a * b.sin(), x, x),
    "results used twice": lambda x, w: (lambda y: again(block(w), y) * y)(again(block(w), x)),
    "several": lambda x, w: several(x, w, (0, 1)),
    "the first of several": lambda x, w: several(x, w, (0,)),
    "the second of several": lambda x, w: several(x, w, (1,)),
    "nested": lambda x, w: again(lambda a: again(block(w), a.sin()) * 2, x),
    "a checkpoint of the other kind inside": lambda x, w: again(
        lambda a: checkpoint(block(w), a.sin(), use_reentrant=False) * 2, x
    ),
    "inside one of the other kind": lambda x, w: checkpoint(
        lambda a: again(block(w), a.sin()) * 2, x, use_reentrant=False
    ),
    "dropout": lambda x, w: again(lambda a: F.dropout(block(w)(a), 0.5), x) + F.dropout(x, 0.3),
    "a plain leaf": lambda x, w: again(lambda a, b: a * b, x, torch.ones(4, requires_grad=True)),
    "autocast": lambda x, w: autocast(x, w),
}


def autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return again(lambda a: F.linear(a, w).float(), x) * 0 + x


LAYOUTS = {
    "both cut": ((Shard(0), Shard(1)), (Replicate(), Replicate())),
    "rows": ((Shard(0), Replicate()), (Replicate(), Shard(0))),
    "columns": ((Replicate(), Replicate()), (Replicate(), Shard(1))),
    "partial": ((Partial(), Shard(0)), (Replicate(), Partial())),
    "interleaved": ((InterleavedShard(1, 2), Replicate()), (Shard(1), Shard(0))),
}


def gradients(place, program, layouts, leaf):
    x, w = place(X, *layouts[0], grad=True), place(W, *layouts[1], grad=True)
    result = program(x if leaf else x * 1, w)
    result.square().sum().backward()
    return [result, x.grad, w.grad]


def run_program(rank, world, name):
    for layouts in LAYOUTS.values():
        for leaf in (True, False):
            check(lambda place: gradients(place, PROGRAMS[name], layouts, leaf))  # noqa: B023


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_one_device(name):
    simulate(4)(run_program, name)


@pytest.mark.parametrize("name", ["a chain", "dropout"])
def test_in_processes(name):
    run(run_program, 4, name)


@on_ranks(4)
def test_what_cannot_be_done_is_refused_in_torchs_words():
    place = Place(device_mesh((2, 2), ("dp", "tp")))
    x, w = place(X, grad=True), place(W, grad=True)
    with warnings.catch_warnings(action="ignore"):
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            torch.autograd.grad(again(block(w), x).sum(), x)
        first, _ = product(x * 1, x)
        first.grad_fn.register_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            again(block(w), first).sum().backward()
        hooked = again(block(w), x * 1)
        hooked.grad_fn.register_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="use_reentrant=True"):
            hooked.sum().backward()
