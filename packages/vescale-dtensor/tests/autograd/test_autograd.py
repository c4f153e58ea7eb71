"""`autograd.grad`, hooks, derivatives of any order and checkpoints are those of one device.

Every program runs on one device and on dp=2 x tp=2, and all that it returns is compared.
"""

import pytest
import torch
import torch.nn.functional as F
from named_cases import named_cases
from one_device import check, full_tensors
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_dtensor.placement_types import StridedShard

PROGRAMS, program = named_cases()
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W, X = data(6, 6), data(8, 6, seed=1)


def moved(place, tensor, *placements):
    return tensor if place.mesh is None else tensor.redistribute(placements=placements)


@program
def autograd_grad_of_leaves_and_activations(place):
    w, x = place(W, R, S0, grad=True), place(X, S0, R, grad=True)
    inner = x * 2
    # On one device nothing is moved, and a tensor of its own is the one that is gathered.
    whole = moved(place, inner, R, R)
    out = F.linear(whole, w).square().sum() + whole.sum()
    found = torch.autograd.grad(out, [w, inner, whole, x], retain_graph=True)
    assert w.grad is None
    return found


@program
def hooks_get_complete_gradients(place):
    seen = {}
    w = place(W, R, S0, grad=True)
    w.register_hook(lambda g: seen.__setitem__("leaf", full_tensors(g)))
    w.register_post_accumulate_grad_hook(lambda p: seen.__setitem__("after", full_tensors(p.grad)))
    inner = place(X, S0, S1, grad=True) * 2
    inner.register_hook(lambda g: g * 1)
    inner.retain_grad()
    whole = moved(place, inner, S0, R)
    whole.register_hook(lambda g: seen.__setitem__("gathered", full_tensors(g)))
    (F.linear(whole, w).square().sum() + whole.sum()).backward()
    return [seen[name] for name in ("leaf", "after", "gathered")], inner.grad


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4, simulated=True)
def test_autograd(name):
    check(PROGRAMS[name], rtol=2e-5, atol=2e-6)


def smooth(x, w, b):
    """Products, sums over split dims, a bias, an activation used twice, a scalar in between."""
    h = F.linear(x, w, b).sin()
    again = h * h.mean() + F.linear(h, w)
    return (again * b).pow(2).sum() + h.sum(0).pow(3).sum() + (w * w).sum() * x.mean()


def derivatives(function, inputs, order):
    """Sums of squares of first derivatives, nested `order` times; gradients of the last."""
    value = function(*inputs)
    for _ in range(order - 1):
        first = torch.autograd.grad(value, inputs, create_graph=True)
        value = sum(g.square().sum() for g in first)
    return torch.autograd.grad(value, inputs)


PLACED = [
    ((S0, R), (R, S0), (R, R)),
    ((S0, S1), (R, S0), (R, S0)),
    ((S0, S1), (R, S1), (R, R)),
    ((R, R), (S0, S1), (R, R)),
    ((R, S1), (R, R), (S0, R)),
    ((R, R), (R, R), (R, R)),
    ((S1, S0), (S1, S0), (S0, S0)),
]
VALUES = [data(5, 6).double() / 2, data(6, 6, seed=1).double() / 2, data(6, seed=2).double() / 2]


def of_each_order(place, places):
    found = []
    for order in (2, 3):
        leaves = [place(v, *p, grad=True) for v, p in zip(VALUES, places, strict=True)]
        # The second also of activations, behind a redistribution where there is something to move.
        inputs = leaves if order == 3 else [t * 1 for t in leaves]
        found += derivatives(smooth, inputs, order)
    return found


@on_ranks(4)
def test_second_and_third_derivatives():
    for places in PLACED:
        check(lambda place: of_each_order(place, places), rtol=1e-9, atol=1e-9)  # noqa: B023


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), StridedShard(0, split_factor=3)])
@on_ranks(2, simulated=True)
def test_copying_where_a_rank_has_nothing_is_derived_twice(rank, world_size, placement):
    mesh = device_mesh((world_size,))
    x = distribute_tensor(torch.full((1, 1), -2.0), mesh, [Shard(1)]).requires_grad_()
    y = distribute_tensor(torch.arange(4.0).reshape(1, 4), mesh, [Replicate()])
    y = y.redistribute(placements=[placement])
    y.copy_(x)
    (first,) = torch.autograd.grad((y**3).sum(), [x], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [x])
    assert first.item() == 4 * 12
    assert second.item() == 4 * -12


@on_ranks(3, simulated=True)
def test_what_is_written_over_has_no_history_on_any_rank(rank, world_size):
    """Also where a rank has nothing, and pads that for an operator that refuses it."""
    mesh = device_mesh((world_size,))
    x = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]).requires_grad_()
    y = F.pad(x, (2, 3), value=0.5)
    y.fill_(0.25)
    (first,) = torch.autograd.grad((y**2).sum() + x.sum(), [x], create_graph=True)
    assert not first.to_local().requires_grad
