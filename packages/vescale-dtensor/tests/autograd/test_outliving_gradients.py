"""What ranks send never depends on when Python frees what nobody can reach any more.

That is chance, on each rank another. So the programs below let go of tensors in cycles, which only
a collection of garbage frees; rank 0 collects at random calls and rank 1 never. Both have to send
the same, and to get what one device gets.
"""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from garbage import bury, garbage_at_random
from named_cases import named_cases
from one_device import Place, differences, full_tensors
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor
from vescale_dtensor.storage import set_gradient_reducer

W = torch.linspace(-1, 1.5, 16).reshape(4, 4)
X = torch.linspace(-2, 3, 24).reshape(6, 4)
PROGRAMS, program = named_cases()


def leaf(place, whole=W):
    return place(whole, Replicate(), grad=True)


def batch(place, whole=X):
    return place(whole, Shard(0))


class Line(Place):
    """One axis, of two ranks."""

    def __call__(self, tensor, dp=None, grad=False):
        if self.mesh is None:
            return tensor.clone().requires_grad_(grad)
        given = tensor.clone().requires_grad_(grad)
        return distribute_tensor(given, self.mesh, [dp or Shard(0)], src_data_rank=None)

    def parameter(self, tensor, dp=None):
        return nn.Parameter(self(tensor, dp or Replicate()))


def outliving(place):
    """A gradient, of which each rank has a part, and whose leaf nobody can reach any more."""
    w = leaf(place)
    F.linear(batch(place), w).square().sum().backward()
    gradient = w.grad
    bury(w)
    return gradient


def gradient_of(parameter, gradient):
    parameter.grad = gradient
    return parameter


def lists(g):
    norm = torch.nn.utils.get_total_norm([g, g[0]])
    torch._foreach_mul_([g], 0.5)
    return norm, torch._foreach_mul([g, g], 2.0), g


def an_optimizer(g):
    p = gradient_of(nn.Parameter(torch.ones_like(g)), g)
    torch.optim.AdamW([p], lr=0.1).step()
    return p, p.grad


def clipped(g):
    p = gradient_of(nn.Parameter(torch.zeros_like(g)), g)
    return nn.utils.clip_grad_norm_([p], 0.5), p.grad, g


def data_set(g):
    g.data = torch.ones_like(g)
    return g * g, g


def redistributed(g, placement):
    return g.redistribute(placements=[placement]) if isinstance(g, DTensor) else g


def of_torch(g):
    return g.to_torch().full_tensor() if isinstance(g, DTensor) else g


USES = {
    "redistribute": lambda g: redistributed(g, Replicate()),
    "redistribute_to_shards": lambda g: redistributed(g, Shard(0)),
    "several_ops": lambda g: (g * g, g.relu(), g.t() @ g),
    "a_view": lambda g: (g[1] * g[1], g * 2, g[1]),
    "lists": lists,
    "data": lambda g: (g.data.mul_(3), g, g.detach() * g),
    "values": lambda g: (g.sum().item(), g.tolist()),
    "written": lambda g: g.clamp_(-1, 1).add_(g),
    "an_optimizer": an_optimizer,
    "clipped": clipped,
    "data_set": data_set,
    "to_torch": lambda g: (of_torch(g), of_torch(g[:2])),
}


@program
def reparametrized(place):
    module = nn.Linear(4, 4)
    nn.init.zeros_(module.bias)
    module.weight = place.parameter(W)
    parametrizations.weight_norm(module)
    result = module(batch(place))
    result.square().sum().backward()
    return result, [p.grad for p in module.parameters()]


@program
def models_that_nobody_keeps(place):
    kept, results = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for part in (model[0], model[2]):
            part.weight = place.parameter(part.weight.detach())
            part.bias = place.parameter(part.bias.detach())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = checkpoint(model, batch(place), use_reentrant=False).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append(loss)
        kept += [p.grad for p in model.parameters()]
        bury(model, optimizer)
    return results, nn.utils.get_total_norm(kept), kept


@program
def a_backward_into_what_nobody_keeps(place):
    w, mine = leaf(place), place(torch.ones(4, 4), Replicate())
    loss = (batch(place) @ w).square().sum()
    loss.backward(retain_graph=True)
    w.grad = mine
    bury(w)
    loss.backward(retain_graph=True)
    loss.backward()
    return mine, mine * 2


@program
def a_reduced_gradient_that_more_is_added_to(place):
    w = leaf(place)
    loss = (batch(place) @ w).square().sum()
    loss.backward(retain_graph=True)
    gradient = w.grad
    first = gradient * 1
    bury(w)
    loss.backward()
    return first, gradient * 1, gradient[0]


@program
def gradients_of_gradients(place):
    w = leaf(place)
    with warnings.catch_warnings(action="ignore"):
        (batch(place) @ w).pow(3).sum().backward(create_graph=True)
    gradient, part = w.grad, w.grad[0]
    bury(w)
    return gradient * 1, part * 2, gradient.detach()


@program
def data_of_what_nobody_keeps(place):
    w = place.parameter(W)
    data, detached = w.data, w.detach()
    (batch(place) @ w).sum().backward()
    gradient = w.grad
    bury(w)
    data.mul_(0.5)
    gradient.mul_(0.25)
    detached.add_(1)
    return data, detached, gradient, gradient.sum()


@program
def copied_views_that_nobody_keeps(place):
    x = place(torch.arange(15.0).reshape(5, 3), Shard(0))
    bury(x.view(-1), x.reshape(3, 5))
    x.mul_(2)
    flat = x.view(-1)
    bury(x.view(3, 5))
    flat.add_(1)
    return x, flat


@program
def copied_views_of_gradients(place):
    w = place(torch.arange(15.0).reshape(5, 3), Shard(0), grad=True)
    loss = w.square().sum()
    loss.backward(retain_graph=True)
    bury(w.grad.view(-1))
    loss.backward()
    return w.grad


@program
def retained_gradients(place):
    w = leaf(place)
    hidden = batch(place) @ w
    hidden.retain_grad()
    loss, kept = hidden.square().sum(), hidden.relu()
    kept.retain_grad()
    bury(hidden)
    (loss + kept.sum()).backward()
    return w.grad, kept.grad


class TwoResults(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: (x * 2, x * 3))
    backward = staticmethod(lambda ctx, first, second: first * 2 + second * 3)


@program
def results_of_functions(place):
    w = leaf(place)
    hidden = batch(place) @ w
    first, second = TwoResults.apply(hidden)
    assert second.grad_fn is not None
    bury(second)
    first.grad_fn  # noqa: B018
    first.square().sum().backward()
    return w.grad


def run_alike(rank, world, name):
    """Run a program on both ranks, and return what this one has sent, and what is wrong."""
    mesh = device_mesh((world,), ("dp",))
    run_on = PROGRAMS.get(name) or (lambda place: USES[name](outliving(place)))
    found = []
    for seed in range(2):
        with trace() as sent, garbage_at_random(rank, seed):
            ours = full_tensors(run_on(Line(mesh)))
        found.append([str(record) for record in _alike(sent.records)])
    return found, differences(ours, full_tensors(run_on(Line())))


def _alike(records):
    # Without the shape: shards may be uneven.
    return [(r.op, r.ranks, r.dtype) for r in records]


@pytest.mark.parametrize("name", [*USES, *PROGRAMS])
def test_what_is_sent_is_no_chance(name):
    (first, wrong), (second, other) = run(run_alike, 2, name, timeout=30, check=True)
    assert first == second
    assert first[0] == first[1]
    assert not wrong
    assert not other


def freed_at_once(rank, world):
    mesh = device_mesh((world,), ("dp",))
    gc.collect()
    gc.disable()
    try:
        place, found = Line(mesh), {}
        for name, of in (("one", 1), ("together", 2)):
            leaves = [leaf(place) for _ in range(of)]
            if of > 1:
                set_gradient_reducer(leaves, lambda given: [each.local for each in given])
            leaves[0].register_hook(lambda g: g * 1)
            loss = sum((batch(place) @ w).square().sum() for w in leaves)
            loss.backward(retain_graph=True)
            assert leaves[0].grad is leaves[0].grad
            alive = weakref.ref(leaves[0].grad._local_tensor)
            leaves[0].grad = None
            found[f"{name}: .grad = None"] = alive() is None
            loss.backward()
            leaves[0].grad * 1
            view = leaves[0].grad[0]
            alive = [weakref.ref(w._local_tensor) for w in leaves]
            alive += [weakref.ref(w.grad._local_tensor) for w in leaves]
            del loss, leaves, view
            found[f"{name}: del"] = [one() is None for one in alive]
        return found
    finally:
        gc.enable()


def test_parameters_and_gradients_are_freed_without_a_collection():
    want = {
        "one: .grad = None": True,
        "one: del": [True] * 2,
        "together: .grad = None": True,
        "together: del": [True] * 4,
    }
    assert simulate(2).run(freed_at_once) == [want, want]
