"""A write to the diagonal of a sharded tensor goes into the tensor; what cannot be is refused."""

import pytest
import torch
from one_device import Place, check
from vescale_comm import simulate
from vescale_comm.testing import device_mesh
from vescale_dtensor import Partial, Replicate, Shard, UnsupportedError

X = torch.arange(60.0).reshape(3, 5, 4)
LAYOUTS = (
    (Shard(0), Shard(1)),
    (Shard(1), Shard(2)),
    (Shard(2), Replicate()),
    (Shard(1), Shard(1)),
    (Partial(), Shard(1)),
)
WRITES = {
    "fill_": lambda d: d.fill_(-1.0),
    "zero_": lambda d: d.zero_(),
    "add_": lambda d: d.add_(1),
    "add_ of a tensor": lambda d: d.add_(d.detach().clone() * 2),
    "copy_": lambda d: d.copy_(torch.ones(d.shape)),
    "sign_": lambda d: d.sign_(),
    "mul_ twice": lambda d: d.mul_(2).mul_(3),
}


def written(place, layout, name):
    x = place(X, *layout)
    found = []
    for options in ({"dim1": -2, "dim2": -1}, {"offset": 1, "dim1": 1, "dim2": 2}, {"offset": -1}):
        diagonal = torch.diagonal(x, **options) if "dim1" in options else x.diagonal(-1)
        returned = WRITES[name](diagonal)
        assert returned is diagonal
        found += [diagonal.clone(), x.clone()]
        del diagonal, returned
    return found


def run_one(rank, world, name):
    for layout in LAYOUTS:
        for _ in range(2):
            check(lambda place: written(place, layout, name))  # noqa: B023


@pytest.mark.parametrize("name", WRITES)
def test_as_on_one_device(name):
    simulate(4)(run_one, name)


def refused(rank, world):
    place = Place(device_mesh((2, 2), ("dp", "tp")))
    x = place(X, Shard(1), Shard(2))
    first, second = x.diagonal(), x.diagonal(1)
    with pytest.raises(UnsupportedError, match="forced a copy"):
        first.fill_(1.0)
    del second
    first.fill_(1.0)
    wanted = place(X, Shard(1), Shard(2), grad=True) * 1
    with pytest.raises(UnsupportedError, match="forced a copy"):
        wanted.diagonal().fill_(1.0)


def test_a_write_that_another_view_or_autograd_should_see_is_refused():
    simulate(4)(refused)
