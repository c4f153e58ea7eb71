"""A plan for operands that fit together is not used for some that do not: ranks would disagree.

Four rows and three over two ranks: the local parts of the first rank fit by chance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vescale_comm.testing import device_mesh, on_ranks
from vescale_dtensor import Replicate, Shard, distribute_tensor


def rows(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def sampled(image, grid):
    return F.grid_sample(image, grid, align_corners=False)


def unpooled(image, places):
    return F.max_unpool2d(image, places, 2)


def pooled(count):
    return F.max_pool2d(rows(count, 2, 4, 4), 2, return_indices=True)


CASES = {
    sampled: [(rows(n, 2, 4, 4), rows(m, 2, 2, 2)) for n, m in ((4, 4), (4, 3), (3, 4), (6, 6))],
    unpooled: [(pooled(n)[0], pooled(m)[1]) for n, m in ((4, 4), (4, 3), (3, 4), (6, 6))],
    torch.binomial: [(rows(n, 3).round(), rows(m, 3) * 0) for n, m in ((4, 4), (4, 3), (4, 1))],
    torch.mul: [(rows(n, 3), rows(m, 3)) for n, m in ((4, 4), (4, 3), (4, 1), (1, 4))],
}
LAYOUTS = [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1))]


def answered(func, operands):
    try:
        return func(*operands)
    except (RuntimeError, ValueError):
        return None


@on_ranks(2, simulated=True)
def test_operands_that_do_not_fit_are_refused_after_some_that_did(rank, world_size):
    mesh = device_mesh((world_size,))
    for func, cases in CASES.items():
        for layout in LAYOUTS:
            for operands in cases:
                placed = [
                    distribute_tensor(x, mesh, [placement], src_data_rank=None)
                    for x, placement in zip(operands, layout, strict=True)
                ]
                wanted, found = answered(func, operands), answered(func, placed)
                shapes = [tuple(x.shape) for x in operands]
                assert (found is None) == (wanted is None), (func, layout, shapes)
                if wanted is not None:
                    torch.testing.assert_close(found.full_tensor(), wanted)
