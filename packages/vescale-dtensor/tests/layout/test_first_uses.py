"""Calls on one mesh are counted alike on all its ranks, whatever a rank does on other meshes."""

import gc
from itertools import product

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Replicate, Shard
from vescale_dtensor._layout.first_uses import FirstUses


class Mesh:
    """Stands for a mesh: counts go by identity."""


def counted(uses, mesh, kind):
    over = uses.is_over(mesh, kind)
    if not over:
        uses.add(mesh, kind)
    return not over


def test_the_first_calls_of_a_kind_are_counted():
    uses, mesh = FirstUses(2, most_kinds=8), Mesh()
    assert [counted(uses, mesh, "a") for _ in range(4)] == [True, True, False, False]
    assert counted(uses, mesh, "b")
    assert counted(uses, Mesh(), "a")
    uses.clear()
    assert counted(uses, mesh, "a")


def test_the_bound_is_that_of_each_mesh():
    """One for all meshes would be reached earlier by a rank that is a member of more of them."""
    uses, mesh, other = FirstUses(1, most_kinds=3), Mesh(), Mesh()
    for kind in range(9):
        assert counted(uses, other, kind) == (kind < 3)
    assert [counted(uses, mesh, kind) for kind in range(4)] == [True, True, True, False]


def test_counts_go_with_their_mesh():
    uses = FirstUses(1, most_kinds=3)
    for _ in range(50):
        assert counted(uses, Mesh(), "a")
    gc.collect()
    uses.is_over(last := Mesh(), "a")
    assert len(uses._meshes) <= 2
    assert not uses.is_over(last, "a")


def compares_on_one_mesh(rank, world_size):
    mesh = device_mesh((2, 1), ("dp", "own"))
    x = vd.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    if rank:
        alone = vd.distribute_tensor(torch.ones(2, 2), mesh["own"], [Replicate()])
        for func, dims, dtype in product(FUNCTIONS, range(1, 16), DTYPES):
            func(alone, torch.ones((1,) * dims, dtype=dtype))
    for func in FUNCTIONS:
        with pytest.raises(vd.DisagreementError):
            func(x, torch.full((4,), float(rank)))
    assert vd.DTensor.from_local(torch.ones(2 - rank, 2), mesh, x.placements).shape == (3, 2)


FUNCTIONS = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
DTYPES = (torch.float32, torch.float64, torch.int32)


def test_a_rank_that_has_used_more_meshes_compares_like_the_others():
    simulate(2)(compares_on_one_mesh)
    assert len(FUNCTIONS) * 15 * len(DTYPES) > 256
