"""What torch writes into its arguments, or hands back in a form of its own, is as on one device.

`out=` of several tensors and of empty ones, in place changes of shape, running statistics, sparse
operands and results, symbolic zeros. The OpInfo sweep (`packages/vescale-dtensor/opinfo`) found
each of these.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import vescale_dtensor as vd
from one_device import check
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Partial, Replicate, Shard, UnsupportedError

torch.manual_seed(0)
WHOLE = torch.randn(5, 6)
ROW = torch.randn(6)
CUBE = torch.randn(1, 5, 3)


def _sorted_into(place):
    values, indices = place(torch.zeros(5, 6)), place(torch.zeros(5, 6, dtype=torch.int64))
    found = torch.sort(place(WHOLE), dim=1, out=(values, indices))
    assert found.values is values
    assert found.indices is indices
    return values, indices


def _into_empty(place):
    out = place(torch.empty(0), Replicate(), Replicate())
    assert torch.add(place(WHOLE), 1, out=out) is out
    assert out.shape == WHOLE.shape
    assert out.stride() == WHOLE.stride()
    out.mul_(2)
    return out, out.numel()


def _into_a_list(place):
    outs = [place(torch.zeros(6), Shard(0), Replicate()) for _ in range(5)]
    assert torch.unbind_copy(place(WHOLE), out=outs) is None
    return outs


def _statistics(place):
    mean, variance = place(ROW, Replicate(), Shard(0)), place(ROW.abs(), Shard(0), Partial())
    return F.batch_norm(place(WHOLE), mean, variance, training=True), mean, variance


def _native_statistics(place):
    mean, variance = place(ROW, Replicate(), Shard(0)), place(ROW.abs(), Shard(0), Replicate())
    found = torch.native_batch_norm(place(WHOLE), None, None, mean, variance, True, 0.1, 1e-5)
    return found, mean, variance


def _views_in_place(place):
    leaf = place(CUBE, Shard(1), Shard(2), grad=True)
    x = leaf * 1
    assert x.squeeze_(0) is x
    assert tuple(x.t_().shape) == (3, 5)
    x.unsqueeze_(1).transpose_(0, 2)
    (x * torch.arange(15.0).reshape(5, 1, 3)).sum().backward()
    return x, leaf.grad


def _written_through(place):
    base = place(CUBE, Shard(1), Shard(2))
    view = base.transpose(1, 2)
    view.transpose_(0, 2)
    view.add_(1)
    return base, view


def _zeros_as_gradients(place):
    leaf = place(WHOLE, Shard(0), Replicate(), grad=True)
    other = place(WHOLE, Replicate(), Shard(1), grad=True)
    leaf.sgn().sum().backward()
    (other.sgn() * place(WHOLE)).sum().backward()
    return leaf.grad, other.grad


def _sparse(place):
    pattern = (WHOLE > 0).float().to_sparse_csr()
    product = torch.sparse.sampled_addmm(pattern, place(WHOLE), place(WHOLE).t().matmul(WHOLE))
    taken = torch.sparse.mm(pattern, place(WHOLE).t())
    return product.to_dense(), taken


def _negative(place):
    return torch.take_along_dim(place(WHOLE), place(torch.tensor([[-1], [-2], [0], [1], [-6]])), 1)


PROGRAMS = {
    name.strip("_").replace("_", " "): program
    for name, program in list(globals().items())
    if name.startswith("_") and getattr(program, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_on_one_device(name):
    simulate(4)(lambda rank, world_size: check(PROGRAMS[name]))


@on_ranks(4)
def test_what_cannot_be_is_refused():
    mesh = device_mesh((2, 2))
    x = vd.distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    with pytest.raises(UnsupportedError, match="as many as there are results"):
        torch.unbind_copy(x, out=[torch.zeros(6)])
    with pytest.raises(UnsupportedError, match="not resized"):
        torch.add(x, 1, out=vd.zeros(3, device_mesh=mesh, placements=[Shard(0), Replicate()]))
    for name in ("as_strided", "as_strided_copy", "as_strided_scatter"):
        more = (torch.zeros(2),) if name.endswith("scatter") else ()
        for part, *where in ((x, (2,), (1,), 0), (x, (9,), (9,)), (x[:, 1:2], (2,), (1,))):
            with pytest.raises(UnsupportedError, match="no memory of its own"):
                getattr(torch, name)(part, *more, *where)
    with pytest.raises(RuntimeError, match="leaf"):
        x.detach().requires_grad_().t_()
    y = x.detach().requires_grad_() * 1
    y.retain_grad()
    with pytest.raises(UnsupportedError, match="retains its gradient"):
        y.t_()
