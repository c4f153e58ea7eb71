"""torch.distributed.checkpoint saves and loads our DTensors in vescale-ckpt's format.

Saved on four ranks and loaded on two and one, in other layouts, by DCP and by `vescale_ckpt.load`.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import vescale_ckpt
from vescale_ckpt.dcp import StorageReader, StorageWriter
from vescale_comm import testing
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_dtensor.state_dict import as_torch

LAYOUTS = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0))]
WRAPPED = (dict, as_torch)


def state(world_size, placements, fill):
    mesh = testing.device_mesh((max(1, world_size // 2), min(2, world_size)), ("dp", "tp"))
    weight = torch.arange(35.0).view(7, 5) if fill else torch.zeros(7, 5)
    weight = distribute_tensor(weight, mesh, placements)
    return {"model": {"0.weight": weight, "norm": torch.full((3,), float(fill))}, "step": int(fill)}


def save(rank, world_size, path):
    for number, placements in enumerate(LAYOUTS):
        # As they are, and as torch's, by turns.
        found = WRAPPED[number % 2](state(world_size, placements, True))
        dcp.save(found, storage_writer=StorageWriter(f"{path}/{number}"))


def load(rank, world_size, path):
    for number, placements in enumerate(reversed(LAYOUTS)):
        ours = state(world_size, placements, False)
        into = WRAPPED[number // 2](ours)
        dcp.load(into, storage_reader=StorageReader(f"{path}/{number}"))
        again = vescale_ckpt.load(f"{path}/{number}", state(world_size, placements, False))
        # `as_torch` is on the memory of ours: what DCP has loaded is there, both ways.
        for tensor in (ours["model"]["0.weight"], again["model"]["0.weight"]):
            assert torch.equal(tensor.full_tensor(), torch.arange(35.0).view(7, 5))
        assert into["model"]["norm"].tolist() == again["model"]["norm"].tolist() == [1, 1, 1]
        assert into["step"] == again["step"] == 1


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_our_tensors_through_dcp(ranks, tmp_path):
    testing.run(save, 4, str(tmp_path))
    testing.run(load, ranks, str(tmp_path))
