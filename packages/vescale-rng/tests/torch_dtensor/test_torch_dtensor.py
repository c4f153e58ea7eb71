"""Property: torch's own DTensor is filled as the tensor of one device that it stands for.

The ranks are played one after another in one process, by torch's fake process group.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_rng import Normal, fill_, layout_of_tensor

RANKS = 8
PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(-1)),
    (Replicate(), Replicate()),
    (_StridedShard(0, split_factor=4), Shard(0)),
    (_StridedShard(1, split_factor=4), Replicate()),
]


@pytest.fixture(params=range(RANKS))
def mesh(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("shape", [(16, 4), (7, 5), (2, 9)])
def test_every_rank_of_stock_dtensor(mesh, shape, placements):
    torch.manual_seed(3)
    expected = torch.randn(shape)
    after = torch.get_rng_state()
    piece = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
    torch.manual_seed(3)
    assert fill_(piece, Normal()) is piece
    assert torch.equal(torch.get_rng_state(), after)
    # torch cuts the expected tensor itself.
    cut = distribute_tensor(expected, mesh, placements, src_data_rank=None)
    assert torch.equal(piece.to_local(), cut.to_local())


def test_partial_is_no_replica(mesh):
    piece = distribute_tensor(torch.zeros(4), mesh, (Replicate(), Replicate()), src_data_rank=None)
    assert layout_of_tensor(piece).replica == (mesh.get_rank(), RANKS)
    partial = type(piece).from_local(torch.zeros(4), mesh, (Partial(), Replicate()))
    assert layout_of_tensor(partial).replica == (mesh.get_rank() % 4, 4)
