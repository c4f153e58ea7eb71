"""Sums of what ragged shards hold have the same bits on any number of ranks, if somebody asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import vescale_dtensor as vd
from torch import Tensor
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import DeviceMesh, MeshError, RaggedShard, Shard, sum_whole

SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": torch.linalg.vector_norm,
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "one norm": lambda x: x.norm(1),
    "sum": torch.sum,
    "rows": lambda x: x.mean(1),
    "std": torch.std,
    "product": lambda x: x.flatten() @ x.flatten(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
}


@pytest.mark.parametrize("kind", SUMS)
def test_the_bits_of_one_device(kind: str):
    torch.manual_seed(0)
    whole = torch.randn(24, 35)

    def on_a_rank(rank: int, count: int) -> None:
        mesh = device_mesh((count,), ("dp",))
        units = [1, 4, 2, 5][:count] if count > 1 else [1]
        units[-1] += 12 - sum(units)
        stored = vd.distribute_tensor(whole, mesh, [RaggedShard((0, 1), units)], src_data_rank=None)
        SUMS[kind](stored)  # a plan that is known already
        sum_whole(mesh, ["dp"])
        assert torch.equal(SUMS[kind](stored).full_tensor(), SUMS[kind](whole))

    for count in (1, 2, 3, 4):
        simulate(count)(on_a_rank)


@on_ranks(2, simulated=True)
def test_what_else_is_as_it_was():
    mesh, other = (DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)) for _ in range(2))
    sum_whole(mesh, ["dp"])
    stored, elsewhere = (
        vd.distribute_tensor(torch.ones(4, 2), one, [RaggedShard((0, 1), (1, 1))])
        for one in (mesh, other)
    )
    activation = vd.distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    for run, ops in (
        (lambda: stored.norm().full_tensor(), {"all_gather"}),
        (lambda: stored.mean(0).full_tensor(), {"all_gather"}),
        (lambda: elsewhere.norm().full_tensor(), {"all_reduce"}),
        (lambda: activation.norm().full_tensor(), {"all_reduce"}),
        (lambda: stored.mul_(2).add(1), set()),
    ):
        with trace() as seen:
            run()
        assert {one.op for one in seen.records} == ops
    with pytest.raises(MeshError, match="no axis 'tp'"):
        sum_whole(mesh, ["tp"])
