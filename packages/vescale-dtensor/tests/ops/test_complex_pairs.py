"""Pairs of a complex tensor that is sharded flat are views of it, as optimizers write to them."""

import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_dtensor import RaggedShard, distribute_tensor

WHOLE = torch.arange(20).view(4, 5) + 1j


def pairs(rank: int, world_size: int) -> None:
    mesh = vd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    flat = RaggedShard((0, 1), (3, 1))
    given = distribute_tensor(WHOLE, mesh, [flat], src_data_rank=None)
    found = torch.view_as_real(given)
    assert found.placements == (flat,)
    assert found.shape == (4, 5, 2)
    assert found.to_local().shape[1:] == (2,)
    found.mul_(2.0)
    assert torch.equal(given.full_tensor(), WHOLE * 2)
    again = torch.view_as_complex(found)
    assert again.placements == (flat,)
    again.add_(1.0)
    assert torch.equal(given.full_tensor(), WHOLE * 2 + 1)
    assert torch.equal(found.sum(-1).full_tensor(), torch.view_as_real(WHOLE * 2 + 1).sum(-1))


def test_pairs_of_a_flat_shard():
    simulate(2).run(pairs)
