"""Collectives keep one order on all ranks; what they read lives until somebody has waited."""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import all_reduce
from vescale_comm.testing import run
from vescale_parallel import mesh
from vescale_parallel._memory.traced import traced
from vescale_parallel.memory import plan


def on_a_rank(rank: int, world_size: int) -> tuple[list[str], bool]:
    """The collectives of a planned order, and whether it computes what the function does."""
    group = mesh(dp=world_size).get_group("dp")

    def function(x: Tensor, y: Tensor) -> Tensor:
        first, second = y * 2, x + 1
        # Ranks differ in what they compute besides, so their plans differ.
        extra = [(x * at).exp().sum() for at in range(3 * rank)]
        late = all_reduce(first, group)
        soon = all_reduce(second[:2], group)
        sums = soon.sum() + late.sum() + (first * 3).sum()
        return torch.stack([sums, *extra]).sum()

    inputs = torch.arange(64.0) + rank, torch.ones(128)
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    found = plan(graph)
    names = [name for name in found.order if name.startswith("all_reduce")]
    results: list[Any] = [function(*inputs), found.run(*inputs), found.apply()(*inputs)]
    of = traced(graph, None)
    users = [{of.nodes[at].name for at in one.users} for one in of.program.storages]
    kept = sum({"all_reduce", "wait_tensor"} <= one for one in users) == 2  # read and made
    return names, kept and all(torch.equal(one, results[0]) for one in results)


def test_ranks_agree():
    for names, right in run(on_a_rank, 2):
        assert names == ["all_reduce", "all_reduce_1"]
        assert right
