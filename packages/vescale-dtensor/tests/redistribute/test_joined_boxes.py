"""Boxes of several members make one tensor, also where they divide it at different rows."""

import random

import pytest
import torch
from vescale_dtensor._redistribute.exchange import LocalBox, pack, packing_of, unpack


def divided(start, shape, depth, chosen):
    """Boxes that tile a box: one dim after the other is cut, each part at another place."""
    dims = [dim for dim, extent in enumerate(shape) if extent > 1]
    if not depth or not dims:
        return [LocalBox(tuple(start), tuple(shape))]
    dim = chosen.choice(dims)
    cut = chosen.randrange(1, shape[dim])
    first, second, later = list(shape), list(shape), list(start)
    first[dim], second[dim], later[dim] = cut, shape[dim] - cut, start[dim] + cut
    return [*divided(start, first, depth - 1, chosen), *divided(later, second, depth - 1, chosen)]


@pytest.mark.parametrize("seed", range(40))
def test_boxes_come_back_to_their_places(seed):
    chosen = random.Random(seed)
    shape = tuple(chosen.randrange(1, 6) for _ in range(chosen.randrange(1, 4)))
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    how = packing_of(divided([0] * len(shape), list(shape), 3, chosen), shape)
    assert torch.equal(unpack(pack(x, how), how, shape), x)


def test_columns_that_are_divided_at_different_rows():
    boxes = [
        LocalBox((0, 0), (1, 2)),
        LocalBox((1, 0), (2, 2)),
        LocalBox((0, 2), (2, 2)),
        LocalBox((2, 2), (1, 2)),
    ]
    x = torch.arange(12.0).view(3, 4)
    how = packing_of(boxes, (3, 4))
    assert torch.equal(unpack(pack(x, how), how, (3, 4)), x)
