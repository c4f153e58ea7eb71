"""A lineage follows from the calls that made a tensor, and from nothing that ranks may differ in.

So it is the same on the fast path and on the slow one, on the first call and on later ones, for
every table of compiled calls, and on ranks that hold nothing.
"""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import simulate
from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, explain

CALLS = {
    "add": lambda x, w: x + x,
    "number": lambda x, w: x * 2.0,
    "number before": lambda x, w: 2.0 - x,
    "method": lambda x, w: x.mul(x).relu(),
    "function": lambda x, w: torch.relu(torch.exp(x)),
    "mm": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, w[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w, beta=0.5),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,)),
    "softmax": lambda x, w: x.softmax(-1),
    "view": lambda x, w: x.view(-1, 2, 2).transpose(1, 2).contiguous(),
    "reshape": lambda x, w: x.t().reshape(-1),
    "index": lambda x, w: x[:, 1:3],
    "chunk": lambda x, w: x.chunk(2, 1)[1],
    "cat": lambda x, w: torch.cat([x, x + 1]),
    "max": lambda x, w: x.max(1)[0],
    "sum": lambda x, w: x.sum(),
    "mean of a dim": lambda x, w: x.mean(dim=1, keepdim=True),
    "moved": lambda x, w: x.t() @ x,
    "contiguous": lambda x, w: x.t().contiguous() * 2,
    "to": lambda x, w: x.to(torch.float64) + 1,
    "to as another": lambda x, w: x.to(w.to(torch.float64)) + 1,
    "in place": lambda x, w: x.detach().clone().add_(1).mul_(2),
    "clone": lambda x, w: x.clone() * 2,
    "clone of a view": lambda x, w: x.t().clone(memory_format=torch.contiguous_format) + 1,
    "set": lambda x, w: assigned(x.detach().clone()),
    "lists": lambda x, w: torch._foreach_add([x.detach(), x.detach()], 1)[0],
    "lists in place": lambda x, w: written(x.detach().clone()),
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.detach().argmax(1)),
    "where": lambda x, w: torch.where(x > 0, x, -x),
    "no dropout": lambda x, w: F.dropout(x, 0.5, False) + 1,
    "gelu of rms": lambda x, w: F.gelu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)),
    "plain": lambda x, w: x + torch.ones(4),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "fallback": lambda x, w: torch.linalg.matrix_power(w, 2),
}


def assigned(x):
    x[0] = 1.0
    return x


def written(x):
    torch._foreach_mul_([x, x + 1], 2)
    return x


def lineages(rank, world_size, name, extent, grad):
    mesh = init_device_mesh("cpu", (world_size,))
    call, found = CALLS[name], []
    x = distribute_tensor(torch.randn(extent, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_(grad)
    x.requires_grad_(grad)
    for watched in (False, False, False, False, True, False):
        with explain() if watched else contextlib.nullcontext():
            result = call(x, w)
        assert isinstance(result, DTensor)
        found.append(result._lineage)
    return found


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", list(CALLS))
def test_the_path_of_a_call_does_not_matter(name, grad):
    for extent in (6, 2):  # of which one rank of three holds nothing
        ranks = simulate(3).run(lineages, name, extent, grad)
        assert len({lineage for found in ranks for lineage in found}) == 1, ranks
        assert ranks[0][0] != 0


def differing(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x, y = (distribute_tensor(torch.ones(n, 4), mesh, [Shard(0)]) for n in (4, 6))
    made = [x + 1, x - 1, (x + 1) + 1, x.neg(), x.neg().neg(), y + 1, x @ x.t(), x.t() @ x]
    made += [(x + 1).add_(1), (x + 1).add_(1).mul_(2), x.chunk(2, 1)[0], x.chunk(2, 1)[1]]
    made += [torch.cat([x, x]), torch.cat([x, x.neg()]), torch.cat([x.neg(), x])]
    return [tensor._lineage for tensor in made]


def test_other_calls_shapes_and_operands_are_other_lineages():
    (found, *others) = simulate(2).run(differing)
    assert len(set(found)) == len(found)
    assert all(other == found for other in others)


def copied(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) + 1
    return x._lineage, (x.clone() if rank else x)._lineage


def test_a_copy_is_the_same_tensor():
    for one, other in simulate(2).run(copied):
        assert one == other != 0


def moved(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) + 1
    return x._lineage, x.redistribute(placements=[Replicate()])._lineage


def test_a_redistributed_tensor_is_the_same_one():
    for one, other in simulate(2).run(moved):
        assert one == other != 0


ALONE = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_dtensor import DTensor, Replicate
for backend, store, world in (("gloo", dist.HashStore(), 1), ("fake", FakeStore(), 8)):
    dist.init_process_group(backend, store=store, rank=0, world_size=world)
    x = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (world,)), [Replicate()])
    for _ in range(3):
        made = [x + x, x.relu(), x * 2.0, x.clone(), torch.softmax(x, -1), x.mm(x)]
        assert all(isinstance(each, DTensor) for each in made)
        assert torch.equal(made[0].to_local(), torch.full((4, 4), 2.0))
        assert not any(each._lineage for each in made), made
    dist.destroy_process_group()
"""


def test_a_world_that_compares_nothing_keeps_no_lineages():
    """One rank alone, and a fake world. In a process of its own, as tests share one world."""
    subprocess.run([sys.executable, "-c", ALONE], check=True)
