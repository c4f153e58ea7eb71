"""What no joint graph can hold is refused with words, and a graph runs for its own kind of call."""

import pytest
import torch
import vescale_dtensor as vd
from torch import nn
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import CaptureError, Partial, Replicate, Shard, gradient_total, joint


def layer(mesh, **options):
    torch.manual_seed(0)
    return vd.distribute_module(nn.Linear(4, 3, **options), mesh)


def distributed(mesh, *shape):
    return vd.distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None)


def refused(words, call, *args):
    with pytest.raises(CaptureError, match=words):
        call(*args)


def hooked(model):
    def step(x):
        y = model(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y.square().mean()

    return step


def refusals(rank, world_size):
    mesh = device_mesh((world_size,), ("dp",))
    x, model = distributed(mesh, 4, 4), layer(mesh)
    refused("returned", joint, model, x)

    def step(x):
        return model(x).square().mean()

    captured = vd.capture(step)
    needs = x.detach().requires_grad_()
    refused("argument of the step requires grad", joint, captured, needs)
    refused("one element", joint, vd.capture(lambda x: model(x)), x)
    refused("one element", joint, vd.capture(lambda x: ("loss", model(x).sum())), x)
    refused("a hook on an activation", joint, vd.capture(hooked(model)), x)
    refused("a backward runs inside", joint, vd.capture(backward_inside(model)), x)
    refused("no parameter", joint, vd.capture(lambda x: (x * 2).sum()), x)
    plain = torch.ones(3, requires_grad=True)
    refused("plain tensor", joint, vd.capture(lambda x: (model(x) * plain).sum()), x)
    average = vd.DTensor.from_local(torch.ones(4), mesh, [Partial("avg")]).requires_grad_()
    if world_size > 1:
        refused("avg", joint, vd.capture(lambda x: (x * average).sum()), x)
    hook = model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused("'weight' has gradient hooks", joint, captured, x)
    hook.remove()
    model.zero_grad()
    whole = joint(captured, x)
    whole(x)
    refused("has a gradient already", whole, x)
    model.zero_grad()
    refused("another kind of call", whole, distributed(mesh, 8, 4))
    loss = whole(x)
    assert not loss.requires_grad
    assert model.weight.grad is not None
    return True


def late(rank, world_size):
    """Rank 0 fills a cache in its first call, which is run and not recorded."""
    mesh = device_mesh((world_size,), ("dp",))
    model, x, cache = layer(mesh), distributed(mesh, 4, 4), {}

    def step(x):
        if not (cache or mesh.get_local_rank()):
            cache[0] = 1
        return model(x).square().mean().redistribute(placements=[Replicate()])  # communicates

    whole = joint(vd.capture(step), x)
    found = [whole(x).full_tensor(), gradient_total(model.weight).full_tensor()]
    model.zero_grad()
    loss = step(x)
    loss.backward()
    expected = [loss.full_tensor(), gradient_total(model.weight).full_tensor()]
    return all(map(torch.equal, found, expected))


def test_ranks_that_record_at_different_calls_make_as_many():
    assert all(simulate(2).run(late))


def backward_inside(model):
    def step(x):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("ranks", [1, 2])
def test_refusals(ranks):
    assert all(simulate(ranks).run(refusals))
