"""An activation is gathered or summed once, however often a model uses it, and never out of date.

The oracle is the same program on one device; what is sent is counted.
"""

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from vescale_comm import trace
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import Replicate, Shard

ROWS, WIDE = 5, 6


def dense(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distributed(mesh, tensor, placement):
    return vd.distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def leaves(mesh):
    """A row-parallel product, whose result is a partial sum, on a mesh and on one device."""
    x, weight = dense(0, ROWS, WIDE), dense(1, WIDE, WIDE)
    ours = distributed(mesh, x, Shard(1)), distributed(mesh, weight, Shard(1)).requires_grad_()
    return ours, (x, weight.clone().requires_grad_())


def written_out_norm(h):
    """Two uses of one activation, as models write it: neither is linear in the other."""
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def several_uses(x, weight):
    h = F.linear(x, weight)
    normed = written_out_norm(h)
    return (normed.exp() + normed * h.sin()).sum() + h.relu().sum()


def a_sum_is_taken_once_each_way(rank, world):
    mesh = device_mesh((world,), ("tp",))
    ours, theirs = leaves(mesh)
    with trace() as forward:
        loss = several_uses(*ours)
    with trace() as backward:
        loss.backward()
    expected = several_uses(*theirs)
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(ours[1].grad.full_tensor(), theirs[1].grad)
    assert forward.counts() == {"all_reduce": 1}
    assert backward.counts() == {}  # the cotangent of a total is whole


def a_gather_is_made_once_each_way(rank, world):
    mesh = device_mesh((world,), ("tp",))
    x, weights = dense(2, ROWS, WIDE), [dense(3 + i, WIDE, WIDE) for i in range(3)]
    ours = distributed(mesh, x, Shard(0)).requires_grad_()
    columns = [distributed(mesh, w, Shard(0)) for w in weights]
    theirs = x.clone().requires_grad_()
    h, expected = ours * 2.0, theirs * 2.0
    with trace() as forward:
        products = [F.linear(h, w) for w in columns]
    total = sum(p.square().sum() for p in products)
    with trace() as backward:
        total.backward()
    sum(F.linear(expected, w).square().sum() for w in weights).backward()
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert sum(forward.counts().values()) == 1
    assert sum(backward.counts().values()) == 1


def a_write_is_seen(rank, world):
    mesh = device_mesh((world,), ("tp",))
    for write in (
        lambda h: h.mul_(3.0),
        lambda h: h.zero_(),
        lambda h: h.view(-1).add_(h.view(-1)),
    ):
        (x, weight), (dense_x, dense_weight) = leaves(mesh)
        with torch.no_grad():
            ours, theirs = F.linear(x, weight), F.linear(dense_x, dense_weight)
            torch.testing.assert_close(ours.exp().full_tensor(), theirs.exp())
            write(ours)
            write(theirs)
            torch.testing.assert_close(ours.exp().full_tensor(), theirs.exp())


def a_view_writes_through(rank, world):
    mesh = device_mesh((world,), ("tp",))
    (x, weight), (dense_x, dense_weight) = leaves(mesh)
    with torch.no_grad():
        ours, theirs = F.linear(x, weight), F.linear(dense_x, dense_weight)
        torch.testing.assert_close(ours.exp().full_tensor(), theirs.exp())
        ours.t().mul_(2.0)
        theirs.t().mul_(2.0)
        torch.testing.assert_close(ours.full_tensor(), theirs)
        torch.testing.assert_close(ours.sin().full_tensor(), theirs.sin())


def what_was_made_without_grad_is_not_used_with_it(rank, world):
    mesh = device_mesh((world,), ("tp",))
    (x, weight), (dense_x, dense_weight) = leaves(mesh)
    ours, theirs = F.linear(x, weight), F.linear(dense_x, dense_weight)
    with torch.no_grad():
        ours.exp()
    ours.exp().sum().backward()
    theirs.exp().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), dense_weight.grad)


def a_handed_out_local_may_be_written(rank, world):
    mesh = device_mesh((world,), ("tp",))
    with torch.no_grad():
        (x, weight), (dense_x, dense_weight) = leaves(mesh)
        ours, theirs = F.linear(x, weight), F.linear(dense_x, dense_weight)
        local = ours.to_local()
        ours.exp()
        local.zero_()
        torch.testing.assert_close(ours.exp().full_tensor(), torch.ones_like(theirs))


def parameters_are_not_held_whole(rank, world):
    mesh = device_mesh((world,), ("tp",))
    weight = distributed(mesh, dense(1, WIDE, WIDE), Shard(0)).requires_grad_()
    buffer = distributed(mesh, dense(1, WIDE, WIDE), Shard(0))
    for tensor in (weight, buffer):
        torch.linalg.qr(tensor)
        torch.softmax(tensor, 0)
        assert tensor._cached_redistribution is None


def recomputation_draws_on_the_same(rank, world):
    from torch.utils.checkpoint import checkpoint

    mesh = device_mesh((world,), ("tp",))
    (x, weight), (dense_x, dense_weight) = leaves(mesh)

    def body(h):
        return (written_out_norm(h) * h).sum()

    checkpoint(body, F.linear(x, weight), use_reentrant=False).backward()
    checkpoint(body, F.linear(dense_x, dense_weight), use_reentrant=False).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), dense_weight.grad)


@pytest.mark.parametrize(
    "body",
    [
        a_sum_is_taken_once_each_way,
        a_gather_is_made_once_each_way,
        a_write_is_seen,
        a_view_writes_through,
        what_was_made_without_grad_is_not_used_with_it,
        a_handed_out_local_may_be_written,
        parameters_are_not_held_whole,
        recomputation_draws_on_the_same,
    ],
)
def test_redistributions_are_cached(body):
    run(body, 3)


def placements_after_use(rank, world):
    mesh = device_mesh((world,), ("tp",))
    (x, weight), _ = leaves(mesh)
    h = F.linear(x, weight)
    h.exp()
    return repr(h.placements), repr(h.detach().placements), repr((h + h).placements), Replicate()


def test_a_tensor_keeps_its_own_placements():
    for own, alias, used, whole in run(placements_after_use, 2):
        assert own == alias == "(Partial(sum),)"
        assert used == repr((whole,))
