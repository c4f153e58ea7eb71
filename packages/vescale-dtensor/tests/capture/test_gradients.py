"""Gradients flow through a replay as through the function, hooks and all.

A case is a function of a mesh dp=2 x tp=2 that builds whatever it needs and returns a function of
the number of the call. One build runs in eager, another captured, call by call; what they return,
and what they leave in random generators, is compared bit for bit, and so are the collectives.
"""

import pytest
import torch
import torch.nn.functional as F
from capture_semantics import check, data, spread
from named_cases import named_cases
from vescale_comm import trace
from vescale_comm.testing import run
from vescale_dtensor import Replicate, Shard

CASES, case = named_cases()

# --- gradients


@case
def gradients_of_arguments(wrap):
    function = wrap(lambda x, y: F.linear(x, y).square().mean())

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0), grad=True)
        y = spread(data(4, 6, seed=step), grad=True)
        function(x, y).backward()
        return x.grad, y.grad

    return call


@case
def a_replicated_leaf_used_both_ways(wrap):
    weight = spread(data(6, 6), grad=True)

    def both(x, y):
        return F.linear(x, weight).square().sum() + F.linear(y, weight).sum()

    function = wrap(both)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0)), spread(data(3, 6))).backward()
        return weight.grad

    return call


@case
def whole_steps_with_residuals(wrap):
    """Nobody differentiates these again, so faces that only retype a gradient are left out."""
    up, down = (
        spread(data(6, 6), tp=Shard(1), grad=True),
        spread(data(6, 6), tp=Shard(0), grad=True),
    )
    norm = spread(data(6, seed=3), grad=True)

    def step(x):
        for leaf in (up, down, norm):
            leaf.grad = None
        h = x
        for depth in range(3):
            h = h + (F.layer_norm(h, (6,), norm) @ up).relu() @ down
            h = h + h.sin() * h + h if depth == 1 else h
        loss = (h + h @ up @ down + h).square().mean()
        loss.backward()
        return loss.detach()

    function = wrap(step)

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0), grad=step > 2)
        return function(x), up.grad, down.grad, norm.grad, x.grad

    return call


@case
def residuals_that_are_differentiated_twice(wrap):
    up, down = (
        spread(data(6, 6), tp=Shard(1), grad=True),
        spread(data(6, 6), tp=Shard(0), grad=True),
    )

    def step(x):
        (gradient,) = torch.autograd.grad((x + x @ up @ down).pow(3).sum(), x, create_graph=True)
        loss = gradient.square().sum()
        loss.backward()
        return loss.detach()

    function = wrap(step)

    def call(step):
        up.grad = down.grad = None
        x = spread(data(5, 6, seed=step), Shard(0), grad=True)
        return function(x), up.grad, down.grad, x.grad

    return call


@case
def an_activation_goes_on_outside(wrap):
    weights = [spread(data(6, 6, seed=i), tp=Shard(0), grad=True) for i in (1, 2)]

    def inside(x):
        hidden = (x * 2).redistribute(placements=[Shard(0), Replicate()])
        return hidden, F.linear(hidden, weights[0]).sum()

    function = wrap(inside, check=None)  # collectives are counted

    def call(step):
        x = spread(data(5, 6, seed=step), grad=True)
        with trace() as traced:
            hidden, first = function(x * spread(data(5, 6), tp=Shard(1)))
            (first + F.linear(hidden, weights[1]).sum()).backward()
        return x.grad, weights[1].grad, [(r.op, r.bytes) for r in traced.records]

    return call


@case
def the_same_activation_in_two_calls(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)
    function = wrap(lambda x: F.linear(x, weight).square().sum())

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0), grad=True)
        hidden = x * 1
        (function(hidden) + function(hidden)).backward()
        return x.grad, weight.grad

    return call


@case
def second_derivatives(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)
    function = wrap(lambda x: F.linear(x, weight).tanh().square().sum())

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0), grad=True)
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, weight.grad

    return call


@case
def gradients_taken_inside(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)

    def penalty(x):
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(
            F.linear(point, weight).tanh().sum(), point, create_graph=True
        )
        return slope.square().sum()

    function = wrap(penalty)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0))).backward()
        return weight.grad

    return call


@case
def backward_inside_with_hooks_of_parameters(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)
    seen = []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor().clone()))

    def step_of(x):
        weight.grad = None
        F.linear(x, weight).square().sum().backward()

    function = wrap(step_of)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0)))
        return list(seen), weight.grad

    return call


@case
def hooks_of_activations(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)

    def hooked(x):
        hidden = x * 2
        split = F.linear(hidden, weight)
        hidden.register_hook(lambda gradient: gradient * 3)
        split.register_hook(lambda gradient: gradient.clamp(max=1.0))
        return split.square().sum() + hidden.sum()

    function = wrap(hooked)

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0), grad=True)
        function(x).backward()
        return x.grad, weight.grad

    return call


@case
def a_partly_frozen_region(wrap):
    one, two = (spread(data(6, 6, seed=i), tp=Shard(0), grad=True) for i in (1, 2))

    def region(x):
        with torch.no_grad():
            scale = F.linear(x, one).abs().mean()
        with torch.enable_grad():
            return F.linear(x, two).sum() * scale

    function = wrap(region)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0))).backward()
        return one.grad, two.grad, torch.is_grad_enabled()

    return call


@case
def autocast_inside(wrap):
    weight = spread(data(6, 6), tp=Shard(0), grad=True)

    def region(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.linear(x, weight) + F.linear(x * 2, weight)
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float() @ weight
        return F.linear(hidden.float(), weight).sum()

    function = wrap(region)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0))).backward()
        return weight.grad, torch.is_autocast_enabled("cpu")

    return call


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name):
    run(check, 4, CASES[name])
