"""Custom autograd.Functions on plain tensors are replayed: forward and backward are the user's own.

Each is called in a training step, captured and in eager mode, five times, with a Python value that
its forward reads changed on the way: same losses, gradients and random numbers, bit for bit.
"""

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from function_cases import Masked, Pair, Returned, Scaled, Viewed, second
from torch import nn
from torch.autograd import Function
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard

STEPS = 5


class Nested(Function):
    """Calls another one, and writes to a tensor from outside."""

    calls = torch.zeros(())

    @staticmethod
    def forward(ctx, x):
        Nested.calls.add_(1)
        return Scaled.apply(x) * 2

    backward = staticmethod(lambda ctx, gradient: gradient * 7)


class Written(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    backward = staticmethod(lambda ctx, gradient: gradient * 2)


class Reading(Function):
    forward = staticmethod(lambda ctx, x: x * float(x.sum()))
    backward = staticmethod(lambda ctx, gradient: gradient)


class Counting(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counting.calls += 1
        return x * 2

    backward = staticmethod(lambda ctx, gradient: gradient)


def mapped(x):
    """On the local tensors of a DTensor."""
    half = vd.distribute_tensor(torch.ones(4), x.device_mesh, [Replicate()], src_data_rank=None)
    return vd.local_map(Scaled.apply, out_placements=[Shard(0)])(x * half).to_local()


REPLAYED = {
    "a number that is read": lambda x: Scaled.apply(x),
    "an argument with a default": lambda x: Scaled.apply(x, 2.0),
    "a context apart": lambda x: sum(Pair.apply(x, x.sin(), 2.0)),
    "one result of two": lambda x: Pair.apply(x, x.sin(), 2.0)[1],
    "random numbers": lambda x: Masked.apply(x) * torch.rand(1),
    "a view": lambda x: Viewed.apply(x) * 2,
    "one inside of another": lambda x: Nested.apply(x),
    "one after another": lambda x: Viewed.apply(Scaled.apply(x.sin())).cos(),
    "second derivatives": second,
    "without a gradient": lambda x: Scaled.apply(x.detach()) + x,
    "a result that is not used": lambda x: (Scaled.apply(x), x * 2)[1],
}


def apply_inside(x):
    class Local(Function):
        forward = staticmethod(lambda ctx, x: x * 2)
        backward = staticmethod(lambda ctx, gradient: gradient)

    return Local.apply(x)


REFUSED = {
    "returns one of its arguments": lambda x: Returned.apply(x) * 2,
    r"returns one of its arguments \(mark_dirty": lambda x: Written.apply(x * 1) * 2,
    "__float__ reads the value": lambda x: Reading.apply(x),
    "class Counting.calls": lambda x: Counting.apply(x),
    "is defined inside": apply_inside,
}


def stepping(function):
    """A training step, with its weight."""
    weight = nn.Parameter(torch.ones(4))

    def step(x):
        weight.grad = None
        loss = function(x * weight).square().sum()
        loss.backward()
        return loss.detach(), weight.grad.clone(), Nested.calls.clone()

    return step


def results(step):
    """What five steps give, with the state that they leave behind."""
    Scaled.factor, found = 2.0, []
    Nested.calls.zero_()
    for seed in range(STEPS):
        if seed == STEPS - 2:
            Scaled.factor = 5.0
        torch.manual_seed(seed)
        found.append((*step(rows(seed=seed)), torch.rand(())))
    return found


def replays(rank, world_size, name, check):
    expected = results(stepping(REPLAYED[name]))
    captured = vd.capture(stepping(REPLAYED[name]), check=check)
    for one, two in zip(expected, results(captured), strict=True):
        assert all(map(torch.equal, one, two))
    assert captured.replays >= 2  # a gradient that is there, and another factor, are recorded anew


@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_bit_for_bit(name):
    simulate(1)(replays, name, False)


def test_on_local_tensors_of_dtensors_and_under_checks():
    def ranks(rank, world_size):
        weight = spread(torch.ones(4), Replicate()).requires_grad_()

        def step(x):
            weight.grad = None
            loss = mapped(x * weight).square().sum()
            loss.backward()
            return loss.detach(), weight.grad.full_tensor()

        captured, expected = vd.capture(step, check=True), None
        for seed in range(3):
            found = captured(spread(rows(seed=seed)))
            expected = step(spread(rows(seed=seed)))
            assert all(map(torch.equal, found, expected))
        assert captured.replays

    Scaled.factor = 2.0
    simulate(2)(ranks)


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(1, simulated=True)
def test_what_is_refused(words):
    captured = vd.capture(stepping(REFUSED[words]))
    with pytest.raises(vd.CaptureError, match=words):
        [captured(rows()) for _ in range(2)]
    runs_on = vd.capture(stepping(REFUSED[words]), refused="run")
    for _ in range(3):
        found, expected = runs_on(rows()), stepping(REFUSED[words])(rows())
        assert all(map(torch.equal, found, expected))
