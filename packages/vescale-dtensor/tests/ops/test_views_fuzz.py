"""Views, slices and look-ups of any layout equal one device: values, gradients, writes through.

Also uneven, empty, nested, interleaved and flattened pieces. Most of them send nothing.
"""

from __future__ import annotations

from itertools import chain, product
from math import prod

import pytest
from vescale_comm import simulate
from vescale_comm.testing import run
from vescale_dtensor import Partial, Replicate, Shard, init_device_mesh, zeros
from view_fuzz import run_views


def judge(sizes, seeds):
    wrong, silent, done = run(run_views, prod(sizes), sizes, seeds, timeout=300)[0]
    assert not wrong, f"{len(wrong)} of {len(seeds)} differ\n" + "\n".join(wrong[:10])
    return silent / done


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3,)])
def test_views_equal_one_device(sizes):
    assert judge(sizes, range(60)) > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3,), (2, 3)])
def test_many_views_equal_one_device(sizes):
    for start in range(1000, 5000, 500):
        judge(sizes, range(start, start + 500))


def test_a_view_of_the_same_shape_keeps_the_layout():
    """Also of dims of one, which several axes shard: recomputations take such views."""

    def program(rank, world_size):
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for where in product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2):
            x = zeros(1, 1, 4, device_mesh=mesh, placements=where)
            found.append((x.view(1, 1, 4).placements, x.reshape(1, -1, 4).placements, where))
        return found

    for same, other, where in chain(*simulate(4).run(program)):
        assert same == other == where
