"""On torch's "fake" backend, which moves nothing, everything runs in one process with the shapes
and the accounting of eight ranks: benchmarks count on that.
"""

import gc

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    dist.destroy_process_group()
    gc.collect()


def test_every_collective_runs(mesh):
    group = vc.group_of(mesh, ("dp", "tp"))
    assert (group.ranks, group.rank) == ((2, 3, 6, 7), 1)
    x = torch.ones(4, 2, requires_grad=True)
    uneven = [1, 4, 0, 2]
    with vc.trace() as t:
        assert vc.all_reduce(x, group).shape == (4, 2)
        assert vc.all_gather(x, group, dim=1).shape == (4, 8)
        assert vc.all_gather(x, group, sizes=uneven).shape == (7, 2)
        assert vc.reduce_scatter(x, group).shape == (1, 2)
        assert vc.reduce_scatter(x, group, sizes=[1, 3, 0, 0]).shape == (3, 2)
        assert vc.all_reduce(torch.ones(3, dtype=torch.int16), group, op="band").shape == (3,)
        shapes = [(1,), (4, 2), (0, 3), ()]
        assert [p.shape for p in vc.gather_pieces(x, group, shapes=shapes)] == shapes
        assert [p.shape for p in vc.all_to_all([x] * 4, group, shapes=shapes)] == shapes
        assert vc.broadcast(x, group).shape == (4, 2)
        assert len(vc.all_reduce_bucketed([x, x], group)) == 2
        vc.barrier(group)
    assert sum(t.counts().values()) == 11
    assert vc.all_reduce(x, group).sum().backward() is None
