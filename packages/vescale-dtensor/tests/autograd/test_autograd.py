"""`autograd.grad`, hooks, derivatives of any order and checkpoints are those of one device.

Every case runs on four processes, mesh dp=2 x tp=2, and compares with plain torch in the same
process.
"""

import pytest
import torch
import torch.nn.functional as F
from gradient_data import close, data, mesh22, sharded
from named_cases import named_cases
from torch.utils.checkpoint import checkpoint
from vescale_comm.testing import run
from vescale_dtensor import Replicate, Shard

CASES, case = named_cases()


@case
def autograd_grad_of_leaves_and_activations(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch = sharded(x, mesh, Shard(0), Replicate(), grad=True)
    inner = batch * 2
    whole = inner.redistribute(mesh, [Replicate(), Replicate()])
    out = F.linear(whole, ours).square().sum() + whole.sum()
    plain = x.clone().requires_grad_()
    plain_inner = plain * 2
    want = F.linear(plain_inner, dense).square().sum() + plain_inner.sum()
    got = torch.autograd.grad(out, [ours, inner, whole, batch], retain_graph=True)
    expected = torch.autograd.grad(want, [dense, plain_inner, plain_inner, plain])
    for mine, theirs in zip(got, expected, strict=True):
        close(mine, theirs)
    assert ours.grad is None


@case
def hooks_get_complete_gradients(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    seen = {}
    placed = sharded(w, mesh, Replicate(), Shard(0), grad=True)
    placed.register_hook(lambda g: seen.__setitem__("leaf", g))
    placed.register_post_accumulate_grad_hook(lambda p: seen.__setitem__("after", p.grad))
    inner = sharded(x, mesh, Shard(0), Shard(1), grad=True) * 2
    whole = inner.redistribute(mesh, [Shard(0), Replicate()])
    whole.register_hook(lambda g: seen.__setitem__("gathered", g))
    inner.register_hook(lambda g: g * 1)
    inner.retain_grad()
    (F.linear(whole, placed).square().sum() + whole.sum()).backward()
    dense, plain = w.clone().requires_grad_(), x.clone().requires_grad_()
    plain_inner = plain * 2
    plain_inner.retain_grad()
    (F.linear(plain_inner, dense).square().sum() + plain_inner.sum()).backward()
    close(seen["leaf"], dense.grad)
    close(seen["after"], dense.grad)
    close(seen["gathered"], plain_inner.grad)
    close(inner.grad, plain_inner.grad)


@case
def a_hook_may_replace_the_gradient(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    batch = sharded(x, mesh, Shard(0), Replicate(), grad=True)
    inner = batch.redistribute(mesh, [Replicate(), Replicate()])
    inner.register_hook(lambda g: g * 3)
    F.linear(inner, sharded(w, mesh, Replicate(), Shard(0))).sum().backward()
    plain = x.clone().requires_grad_()
    (F.linear(plain, w).sum() * 3).backward()
    close(batch.grad, plain.grad)


@case
def double_backward(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch, plain = sharded(x, mesh, Shard(0), Shard(1), grad=True), x.clone().requires_grad_()
    gathered = batch.redistribute(mesh, [Shard(0), Replicate()])
    (first,) = torch.autograd.grad(F.linear(gathered, ours).pow(3).sum(), batch, create_graph=True)
    (want,) = torch.autograd.grad(F.linear(plain, dense).pow(3).sum(), plain, create_graph=True)
    close(first, want)
    first.square().sum().backward()
    want.square().sum().backward()
    close(batch.grad, plain.grad)
    close(ours.grad, dense.grad)


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


R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACED = [
    ((S0, R), (R, S0), (R, R)),
    ((S0, S1), (R, S0), (R, S0)),
    ((S0, S1), (R, S1), (R, R)),
    ((R, R), (S0, S1), (R, R)),
    ((R, S1), (R, R), (S0, R)),
    ((R, R), (R, R), (R, R)),
    ((S1, S0), (S1, S0), (S0, S0)),
]


@case
def second_and_third_derivatives(mesh):
    shapes = ((5, 6), (6, 6), (6,))
    values = [data(*shape, seed=i).double() / 2 for i, shape in enumerate(shapes)]
    for places in PLACED:
        for order in (1, 2, 3):
            ours = [sharded(v, mesh, *p, grad=True) for v, p in zip(values, places, strict=True)]
            # Also as activations, behind a redistribution where there is something to move.
            inner = [t * 1 for t in ours]
            dense = [v.clone().requires_grad_() for v in values]
            want = derivatives(smooth, dense, order)
            for inputs in (ours, inner):
                for mine, theirs in zip(derivatives(smooth, inputs, order), want, strict=True):
                    whole = mine.full_tensor()
                    torch.testing.assert_close(whole, theirs, rtol=1e-9, atol=1e-9)


@case
def checkpointing_draws_the_same_mask_again(mesh):
    w, x = data(6, 6), data(8, 6, seed=1)
    ours, dense = sharded(w, mesh, Replicate(), Shard(0), grad=True), w.clone().requires_grad_()
    batch, plain = sharded(x, mesh, Shard(0), Replicate(), grad=True), x.clone().requires_grad_()
    torch.manual_seed(5)
    block = lambda t, p: F.dropout(F.linear(t, p), 0.5).relu()  # noqa: E731
    checkpoint(block, batch * 1, ours, use_reentrant=False).sum().backward()
    ours_after = torch.get_rng_state()
    torch.manual_seed(5)
    checkpoint(block, plain * 1, dense, use_reentrant=False).sum().backward()
    assert torch.equal(ours_after, torch.get_rng_state())
    close(ours.grad, dense.grad)
    close(batch.grad, plain.grad)


def run_case(rank, world, name):
    CASES[name](mesh22())


@pytest.mark.parametrize("name", CASES)
def test_autograd(name):
    run(run_case, 4, name)
