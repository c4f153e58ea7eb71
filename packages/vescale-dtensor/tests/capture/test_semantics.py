"""A replay writes, aliases, draws and returns what the function does.

A case is a function of a mesh dp=2 x tp=2 that builds whatever it needs and returns a function of
the number of the call. One build runs in eager, another captured, call by call; what they return,
and what they leave in random generators, is compared bit for bit, and so are the collectives.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import vescale_comm
import vescale_dtensor as vd
from capture_semantics import check, data, grid, spread
from named_cases import named_cases
from torch import nn
from vescale_comm import trace
from vescale_comm.testing import on_ranks, run
from vescale_dtensor import Partial, Replicate, Shard

CASES, case = named_cases()

# --- writes and aliases


@case
def an_argument_is_written(wrap):
    function = wrap(lambda x: x.mul_(2).add_(1).sum(0))

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0))
        return function(x), x

    return call


@case
def a_slice_of_an_argument_is_written(wrap):
    def write(x, y):
        x[:, 1:3] = y
        x[:, 0].zero_()
        return x

    function = wrap(write)

    def call(step):
        x = spread(data(5, 6, seed=step), tp=Shard(0))
        return function(x, 3.0) is x, x

    return call


@case
def a_copy_is_returned_beside_its_source(wrap):
    def both(x):
        y = x * 2
        return y, y.clone()

    function = wrap(both)

    def call(step):
        source, copy = function(spread(data(5, 6, seed=step), Shard(0)))
        source.add_(1)
        return source, copy

    return call


@case
def an_argument_gets_a_history(wrap):
    weight = spread(data(6), grad=True)
    function = wrap(lambda x: x.mul_(weight))

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0))
        function(x)
        x.sum().backward()
        return x, weight.grad

    return call


@case
def a_buffer_is_counted(wrap):
    norm = vd.distribute_module(nn.BatchNorm1d(6), grid())
    function = wrap(norm)
    return lambda step: (
        function(spread(data(5, 6, seed=step), Shard(0))),
        norm.running_mean,
        norm.num_batches_tracked,
    )


@case
def a_parameter_is_written_in_place(wrap):
    weight = spread(data(6), tp=Shard(0), grad=True)
    function = wrap(lambda x: x * weight)

    def call(step):
        with torch.no_grad():
            weight.add_(step)
        return function(spread(data(5, 6), tp=Shard(1)))

    return call


@case
def the_data_of_a_parameter_is_replaced(wrap):
    weight = spread(data(6), grad=True)
    function = wrap(lambda x: (x * weight).sum())

    def call(step):
        weight.data = spread(data(6, seed=step))
        function(spread(data(5, 6), Shard(0))).backward()
        return weight.grad

    return call


@case
def a_view_of_an_argument_comes_back(wrap):
    function = wrap(lambda x: (x.view(5, 3, 2), x.transpose(0, 1), x))

    def call(step):
        x = spread(data(5, 6, seed=step), Shard(0))
        views = function(x)
        x.zero_()
        return views

    return call


@case
def a_copied_view_keeps_its_argument_unwritable(wrap):
    function = wrap(lambda x: x.view(3, 10))

    def call(step):
        x = spread(data(5, 6, seed=step), tp=Shard(1))
        view = function(x)
        with pytest.raises(vd.UnsupportedError):
            x.zero_()
        return view

    return call


@case
def an_argument_with_a_copied_view_stays_unwritable(wrap):
    function = wrap(lambda x: x.add_(1))

    def call(step):
        x = spread(data(5, 6, seed=step), tp=Shard(1))
        if step == 2:
            view = x.view(3, 10)
            with pytest.raises(vd.UnsupportedError):
                function(x)
            return view
        return function(x)

    return call


@case
def assigning_data_inside(wrap):
    def assign(x, y):
        z = x * 1
        z.data = y
        return z

    function = wrap(assign)
    return lambda step: function(spread(data(6, seed=step)), spread(data(6), tp=Shard(0)))


# --- random numbers, collectives, Python


@case
def random_numbers_of_all_kinds(wrap):
    own = torch.Generator().manual_seed(3)

    def draw(x):
        drawn = vd.rand(5, 6, device_mesh=grid(), placements=[Shard(0), Shard(1)])
        plain = torch.rand(6) + torch.randn(6, generator=own)
        local = vescale_comm.all_reduce(torch.ones(3))
        noise = torch.empty_like(x).uniform_(-1, 1) + torch.rand_like(x) + torch.randn_like(x)
        return F.dropout(x * drawn + noise, 0.3) * plain, local

    function = wrap(draw)
    return lambda step: (*function(spread(data(5, 6), Shard(0))), own.initial_seed(), torch.rand(1))


@case
def collectives_of_the_user(wrap):
    group = vescale_comm.group_of(grid(), "tp")

    def mapped(x):
        return vescale_comm.all_reduce(x, group) + vescale_comm.all_gather(x, group).sum()

    function = wrap(vd.local_map(mapped, out_placements=[Shard(0), Partial()]))

    def call(step):
        x = spread(data(4, 6, seed=step), Shard(0), Shard(1), grad=True)
        with trace() as traced:
            y = function(x)
            y.sum().backward()
        return y, x.grad, traced.counts()

    return call


class Pair(NamedTuple):
    first: object
    second: object


@case
def outputs_of_any_form(wrap):
    constant = data(3)

    def many(x, *, scale, flag=True, names=("a", "b")):
        return {"pair": Pair(x * scale, [x, None]), "n": len(names), "flag": flag, "c": constant}

    function = wrap(many)
    return lambda step: function(spread(data(5, 6, seed=step)), scale=2.5, names=["a", "b", "c"])


@case
def nothing_is_returned(wrap):
    counter = spread(torch.zeros(3), tp=Shard(0))

    def count():
        counter.add_(1)

    function = wrap(count)
    return lambda step: (function(), counter)


@case
def ops_without_a_rule(wrap):
    function = wrap(lambda x: torch.linalg.qr(x)[1].abs() + x.flip(0).cummax(0).values)
    return lambda step: function(spread(data(6, 6, seed=step), Shard(0), Shard(1)))


@case
def inference(wrap):
    model = vd.distribute_module(nn.Linear(6, 4), grid())
    function = wrap(lambda x: model(x).relu_().mul_(2))

    def call(step):
        with torch.inference_mode():
            return function(spread(data(5, 6, seed=step), Shard(0))).clone()

    return call


@case
def captured_inside_captured(wrap):
    inner = wrap(lambda x: x * 2)
    function = wrap(lambda x: inner(x) + 1)
    return lambda step: function(spread(data(5, 6, seed=step), Shard(0)))


@case
def a_module_with_backward_hooks(wrap):
    seen = []
    model = vd.distribute_module(nn.Linear(6, 4), grid())
    model.weight.register_hook(lambda gradient: seen.append(gradient.full_tensor()))
    function = wrap(model)

    def call(step):
        function(spread(data(5, 6, seed=step), Shard(0))).sum().backward()
        return list(seen), model.weight.grad

    return call


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name):
    run(check, 4, CASES[name])


def written_copy(rank, world_size):
    """Eagerly a copied view knows the way into its argument; of a replay it is refused."""
    function, written = vd.capture(lambda x: x.view(3, 10), check=None), []
    for step in range(4):
        plain = data(5, 6, seed=step)
        x = spread(plain, tp=Shard(1))
        view = function(x)
        try:
            view.add_(1)
        except vd.UnsupportedError:
            written.append(False)
        else:
            written.append(True)
            plain.add_(1)
        assert torch.equal(x.full_tensor(), plain)
    return written


def test_a_write_to_a_copied_view_is_never_lost():
    assert not any(written[-1] for written in run(written_copy, 4))


@on_ranks(2, simulated=True)
def test_replays_write_as_well(rank, world_size):
    mesh = vd.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    losses = {}
    for wrap in (lambda function: function, vd.capture):
        weight = vd.distribute_tensor(torch.linspace(-1, 1, 12).view(3, 4), mesh, [Replicate()])
        weight.requires_grad_()

        def loss(x, weight=weight):
            with torch.no_grad():
                weight[0].mul_(0.5)
                weight[1:, 2] = 0.25
            return (x @ weight.t()).square().sum()

        function = wrap(loss)
        found = losses[wrap] = []
        for step in range(4):
            x = torch.linspace(0, 1 + step, 20).view(5, 4)
            one = function(vd.distribute_tensor(x, mesh, [Shard(0)]))
            one.backward()
            found += [one.full_tensor().detach(), weight.grad.full_tensor()]
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.01)
            weight.grad = None
    assert function._misses.replays > 0
    eager, captured = losses.values()
    assert all(map(torch.equal, eager, captured))
