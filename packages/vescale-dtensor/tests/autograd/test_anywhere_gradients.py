"""Gradients that are kept, recorded, viewed or written by hand are those of one device.

Each program runs wherever its tensors may lie; see `anywhere`.
"""

import pytest
import torch
import torch.nn.functional as F
from anywhere import check
from named_cases import named_cases
from torch import nn
from torch.utils.checkpoint import checkpoint

W = torch.linspace(-1, 1.5, 24).reshape(6, 4)
X = torch.linspace(-2, 3, 20).reshape(5, 4)
SCALE = torch.linspace(0, 1, 30).reshape(5, 6)
PROGRAMS, program = named_cases()


def loss_of(place, w):
    return (F.linear(place(X), w) * place(SCALE)).sin().sum() + (w * place(W)).sum()


@program
def kept_gradients_accumulate(place):
    x = place(W, grad=True)
    inner = x * 2
    inner.retain_grad()
    loss = (inner * inner).sum()
    loss.backward(retain_graph=True)
    first = inner.grad.clone()
    loss.backward()
    return first, inner.grad, x.grad


@program
def kept_gradients_can_be_dropped_and_set(place):
    inner = place(W, grad=True) * 2
    inner.retain_grad()
    loss = (inner * inner).sum()
    loss.backward(retain_graph=True)
    inner.grad = None
    assert inner.grad is None
    loss.backward(retain_graph=True)
    dropped = inner.grad.clone()
    inner.grad = place(W)
    loss.backward()
    return dropped, inner.grad


@program
def kept_gradients_share_no_memory(place):
    x = place(W, grad=True)
    first, second = x * 2, x * 3
    first.retain_grad()
    second.retain_grad()
    ((first + second) * place(W)).sum().backward()
    first.grad.mul_(2)
    return first.grad, second.grad, x.grad


@program
def kept_gradients_can_be_differentiated(place):
    x = place(W, grad=True)
    inner = x * 2
    inner.retain_grad()
    (inner**3).sum().backward(create_graph=True)
    return inner.grad, torch.autograd.grad(inner.grad.square().sum(), x)


@program
def gradients_are_kept_after_use(place):
    x = place(W, grad=True)
    inner = x.sin()
    used = (inner @ place(W.t())).sum() + inner.softmax(0).square().sum()
    inner.retain_grad()
    (used + inner.softmax(1).square().sum()).backward()
    return inner.grad, x.grad


@program
def a_backward_to_an_activation(place):
    x = place(W, grad=True)
    inner = x.sin()
    loss = (inner @ place(W.t())).sum() + inner.softmax(0).square().sum()
    loss.backward(inputs=[inner], retain_graph=True)
    assert x.grad is None
    first = inner.grad.clone()
    loss.backward()
    return first, inner.grad, x.grad


@program
def gradients_of_leaves_are_differentiated(place):
    x, w = place(W, grad=True), place(W[:, 0], grad=True)
    (x.t() @ w).pow(3).sum().backward(create_graph=True)
    first = [x.grad.clone(), w.grad.clone()]
    again = x.grad.square().sum() + w.grad.square().sum()
    x.grad = w.grad = None
    again.backward()
    return first, x.grad, w.grad


VIEWS = {
    "transposed": lambda g: g.t(),
    "a slice": lambda g: g[1:],
    "a row": lambda g: g[2],
    "columns": lambda g: g[:, 1:3],
    "flat": lambda g: g.view(-1),
    "split": lambda g: g.split(3)[1],
    "unbound": lambda g: g.unbind(0)[1],
    "detached": lambda g: g.detach(),
    "data": lambda g: g.data,
    "a view of a view": lambda g: g.t()[1:],
}


def viewed(place, view):
    """A view of a gradient that owes a sum shows the total once that is taken, and so on."""
    x = place(W, grad=True)
    loss_of(place, x).backward()
    part = view(x.grad)
    norm = nn.utils.clip_grad_norm_([x], 1.0)
    clipped = part.clone()
    part.mul_(2)
    written = x.grad.clone()
    loss_of(place, x).backward()
    return norm, clipped, written, part.clone(), x.grad.norm(), x.grad


@program
def a_recorded_write_to_a_view_of_a_leaf_is_refused(place):
    results = []
    for write in (
        lambda x: x[1:3].zero_(),
        lambda x: x.__setitem__(slice(1, 3), 0.0),
        lambda x: x.view(-1)[2:5].zero_(),
        lambda x: x.t().add_(1),
    ):
        x = place(W, grad=True)
        with pytest.raises(RuntimeError, match=r"view of a leaf|forced a copy"):
            write(x)
        results.append(x.detach())
    return results


@program
def detached_in_place(place):
    x = place(W, grad=True)
    inner = x * 2
    inner.detach_()
    with torch.no_grad():
        inner.add_(1)
    assert not inner.requires_grad
    (inner * x).sum().backward()
    return x.grad, inner


@program
def checkpoints_nest(place):
    first, second = place(W, grad=True), place(W, grad=True)
    x = place(X, grad=True)

    def inside(a):
        return F.dropout(F.linear(a, first), 0.3)

    def outside(a):
        return F.linear(a, first) + checkpoint(inside, a * 2, use_reentrant=False).tanh() @ (
            second @ second.t()
        )

    torch.manual_seed(2)
    result = checkpoint(outside, x, use_reentrant=False)
    result.square().sum().backward()
    return result, x.grad, first.grad, second.grad


@program
def wrong_shapes_are_told_of_the_whole(place):
    x = place(W, grad=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(x * 2, x, place(W[0]))


@program
def sparse_gradients_reach_what_is_not_a_leaf(place):
    x = place(W, grad=True)
    rows = F.embedding(torch.tensor([1, 2, 2, 5]), x * 1, sparse=True)
    (rows * place(W[:4])).sum().backward()
    return x.grad.to_dense() if x.grad.is_sparse else x.grad


@program
def hooks_that_change_the_gradient(place):
    x = place(W, grad=True)

    def scaled(leaf):
        leaf.grad = leaf.grad * 2

    x.register_post_accumulate_grad_hook(scaled)
    x.register_hook(lambda g: g.mul_(2) + 1)
    seen = []
    for _ in range(2):
        loss_of(place, x).backward()
        seen.append(x.grad.clone())
    return seen


@program
def gradients_of_all_that_is_an_average(place):
    x = place(W, grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    inner = x * 3
    inner.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    inner.retain_grad()
    loss = (inner * 2).sum() + (x * place(W)).sum()
    asked = torch.autograd.grad(loss, [x, inner], retain_graph=True)
    loss.backward()
    (x * 5).backward(place(W))
    return asked, seen, inner.grad, x.grad


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_anywhere(name):
    check(PROGRAMS[name])


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_gradients(name):
    check(lambda place: viewed(place, VIEWS[name]))
