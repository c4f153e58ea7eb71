"""An activation is gathered or summed once, however often a model uses it, and never out of date.

Every program runs on one device and on dp=2 x tp=2, and all that it returns is compared; what is
sent is counted.
"""

import pytest
import torch
import torch.nn.functional as F
from named_cases import named_cases
from one_device import check, full_tensors
from torch.utils.checkpoint import checkpoint
from vescale_comm import simulate, trace
from vescale_comm.testing import run
from vescale_dtensor import Partial, Replicate, Shard

PROGRAMS, program = named_cases()
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def dense(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, WEIGHT, WEIGHTS = dense(0, 5, 6), dense(1, 6, 6), [dense(3 + i, 6, 6) for i in range(3)]


def product(place):
    """A row-parallel product, which is a partial sum, and its weight."""
    weight = place(WEIGHT, R, S1, grad=True)
    return F.linear(place(X, R, S1), weight), weight


def sends(place, counts, work):
    with trace() as traced:
        result = work()
    assert place.mesh is None or list(traced.counts().values()) == counts
    return result


def written_out_norm(h):
    """Two uses of one activation, as models write it: neither is linear in the other."""
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


@program
def a_sum_is_taken_once_each_way(place):
    h, weight = product(place)

    def several_uses():
        normed = written_out_norm(h)
        return (normed.exp() + normed * h.sin()).sum() + h.relu().sum()

    loss = sends(place, [1], several_uses)
    sends(place, [], loss.backward)  # the cotangent of a total is whole
    return loss, weight.grad


@program
def a_gather_is_made_once_each_way(place):
    x = place(X, R, S0, grad=True)
    h, columns = x * 2.0, [place(w, R, S0) for w in WEIGHTS]
    products = sends(place, [1], lambda: [F.linear(h, w) for w in columns])
    sends(place, [1], sum(p.square().sum() for p in products).backward)
    return x.grad


WRITES = (
    lambda h: h.mul_(3.0),
    lambda h: h.zero_(),
    lambda h: h.view(-1).add_(h.view(-1)),
    lambda h: h.t().mul_(2.0),
    lambda h: h.data.add_(1),
)


@program
@torch.no_grad()
def a_write_is_seen(place):
    found = []
    for write in WRITES:
        h, _ = product(place)
        found.append(h.exp())
        write(h)
        found += [h.exp(), h.sin(), h]
    return found


@program
def what_was_made_without_grad_is_not_used_with_it(place):
    h, weight = product(place)
    with torch.no_grad():
        h.exp()
    h.exp().sum().backward()
    return weight.grad


@program
@torch.no_grad()
def a_handed_out_local_may_be_written(place):
    h, _ = product(place)
    local = h if place.mesh is None else h.to_local()
    h.exp()
    local.zero_()
    return h.exp()


@program
def parameters_are_not_held_whole(place):
    for tensor in (place(WEIGHT, R, S0, grad=True), place(WEIGHT, R, S0)):
        found = [torch.linalg.qr(tensor)[1].abs(), torch.softmax(tensor, 0)]
        assert place.mesh is None or tensor._cached_redistribution is None
    return found


@program
def recomputation_draws_on_the_same(place):
    h, weight = product(place)
    loss = checkpoint(lambda h: (written_out_norm(h) * h).sum(), h, use_reentrant=False)
    loss.backward()
    return weight.grad


@program
def a_tensor_keeps_its_own_placements(place):
    h, _ = product(place)
    h.exp()
    if place.mesh is not None:
        assert h.placements == h.detach().placements == (R, Partial())
        assert (h + h).placements == (R, R)
    return full_tensors(h)


def run_program(rank, world, name):
    check(PROGRAMS[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_redistributions_are_cached(name):
    simulate(4).run(run_program, name)


def test_in_processes():
    run(run_program, 4, "a_sum_is_taken_once_each_way")
