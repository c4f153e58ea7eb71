"""Property: scratch is bounded whatever the global size, and the cuts at real sizes are right."""

import tracemalloc
from itertools import product
from math import prod

import pytest
import torch
from rng_pieces import Shard, boxes_of
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_rng import Bernoulli, LogNormal, Normal, Uniform, fill_, layout_of, rand
from vescale_rng.streams import advance, draws

MEGABYTE = 1 << 20


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any torch op returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("distribution", [Uniform(), Normal(), Bernoulli(0.1), LogNormal()])
@pytest.mark.parametrize("shape", [(1 << 20, 1 << 20), (3, 1 << 40), (1 << 40, 3)])
def test_a_piece_of_a_tensor_of_terabytes_costs_megabytes(shape, distribution):
    mesh = tuple(max(1, n >> 6) if n > 3 else 1 for n in shape)
    coordinate = tuple(n // 2 for n in mesh)
    layout = layout_of(shape, [Shard(0), Shard(1)], mesh, coordinate)
    generator = torch.Generator().manual_seed(3)
    with LargestTensor():
        torch.empty(1).normal_()  # what torch imports for its first mode is no cost of a fill
    tracemalloc.start()
    with LargestTensor() as seen:
        fill_(torch.empty(layout.local_shape), distribution, layout, generator)
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen.largest <= 3 * MEGABYTE
    assert numpy_peak <= 32 * MEGABYTE
    moved = torch.Generator().manual_seed(3)
    advance(draws(distribution, shape), moved)
    assert torch.equal(generator.get_state(), moved.get_state())


def test_a_row_far_away_is_the_stream_far_away():
    shape = (10**6, 10**6)
    layout = layout_of(shape, [Shard(0)], (10**6,), (10**6 - 2,))
    generator = torch.Generator().manual_seed(3)
    row = rand(layout, generator=generator)
    direct = torch.Generator().manual_seed(3)
    advance((10**6 - 2) * 10**6, direct)
    assert torch.equal(row[0], torch.rand(10**6, generator=direct))


# Around the window of 2**17 elements, which the small cases never reach.
SHAPES = [
    ((1 << 17,), (Shard(0),)),
    (((1 << 18) + 5,), (Shard(0),)),
    ((17, 3 * (1 << 13) + 1), (Shard(1),)),
    ((40, 16384), (Shard(1),)),
    ((3, 70_001), (Shard(1, blocks=3),)),
    ((2, 5, 40_000), (Shard(1),)),
    ((70_001, 3), (Shard(1),)),
    ((300, 2000), (Shard(1, blocks=40),)),
    ((9000, 64), (Shard(0, blocks=700),)),
    ((60, 70, 80), (Shard(1, blocks=7), Shard(2, blocks=5))),
    ((2, 150_000), (Shard(1),)),
]


@pytest.mark.parametrize("distribution", [Uniform(), Normal(), Bernoulli(0.1)])
@pytest.mark.parametrize(("shape", "placements"), SHAPES)
def test_real_windows_and_gaps(shape, placements, distribution):
    one = torch.Generator().manual_seed(9)
    expected = torch.empty(shape)
    distribution.draw(expected, one)
    held = 0
    for coordinate in product(range(3), repeat=len(placements)):
        layout = layout_of(shape, placements, (3,) * len(placements), coordinate)
        generator = torch.Generator().manual_seed(9)
        local = fill_(torch.empty(layout.local_shape), distribution, layout, generator)
        for slices, view in boxes_of(local, layout):
            assert torch.equal(view, expected[slices])
            held += view.numel()
        assert torch.equal(generator.get_state(), one.get_state())
    assert held == prod(shape)
