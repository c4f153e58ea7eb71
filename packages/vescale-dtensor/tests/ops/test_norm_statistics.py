"""Batch normalisation communicates its statistics once, under each of torch's names for it."""

import pytest
import torch
import torch.nn.functional as F
from vescale_comm import simulate, trace
from vescale_comm.testing import on_ranks
from vescale_dtensor import Shard, distribute_tensor, init_device_mesh

BATCH = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))
NATIVE = {
    "native_batch_norm": lambda x, m, v: torch.native_batch_norm(
        x, None, None, m, v, True, 0.1, 1e-5
    ),
    "_native_batch_norm_legit": lambda x, m, v: torch._native_batch_norm_legit(
        x, None, None, m, v, True, 0.1, 1e-5
    ),
    "_batch_norm_with_update": lambda x, m, v: torch.ops.aten._batch_norm_with_update(
        x, None, None, m, v, 0.1, 1e-5
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_statistics_are_sent_once(name):
    expected = NATIVE[name](BATCH, torch.zeros(3), torch.ones(3))

    def measure(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        x = distribute_tensor(BATCH, mesh, [Shard(0)])
        with trace() as functional:
            F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)
        with trace() as native:
            found = NATIVE[name](x, torch.zeros(3), torch.ones(3))
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        return functional.counts(), native.counts()

    for functional, native in simulate(2)(measure):
        assert functional == native
        assert functional


def test_one_value_per_channel_is_no_error_where_torch_has_none():
    one = BATCH[:1, :, :1, :1]
    expected = torch.native_batch_norm(one, None, None, None, None, True, 0.1, 1e-5)

    def run(rank, world_size):
        x = distribute_tensor(one, init_device_mesh("cpu", (world_size,)), [Shard(1)])
        found = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)

    simulate(2)(run)


@on_ranks(2, simulated=True)
def test_the_rows_of_the_global_batch_are_counted(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(0))
    d = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(F.group_norm(d, 3).full_tensor(), F.group_norm(x, 3))
    for one in (x[:1], d[:1]):
        with pytest.raises(ValueError, match=r"more than 1 value per channel .* \[1, 3, 1\]"):
            F.group_norm(one, 3)
