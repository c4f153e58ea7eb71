"""An index that is out of range is refused on every rank, whichever dims are sharded.

Ranks translate global indices to places in their shards; one that no rank has a place for must not
become a zero, or a write that is dropped. A rank without elements of the result looks at no index,
so shards here are uneven and not empty, and indices of single elements are wrong in all places.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from on_mesh import on_mesh
from vescale_dtensor import Replicate, Shard, distribute_tensor

TABLE = torch.arange(49.0).reshape(7, 7) + 1
ROW, COLUMN = torch.ones(1, 7), torch.ones(7, 1)
LAYOUTS = list(product((Replicate(), Shard(0), Shard(1)), repeat=2))
OUT_OF_RANGE = {"too large": 9, "too small": -9}


def indices(bad, *others):
    return torch.tensor([*others, bad])


CALLS = {
    "x[i]": lambda x, bad: x[indices(bad, 0)],
    "x[i, j]": lambda x, bad: x[indices(bad, 0), indices(1, 2)],
    "x[j, i]": lambda x, bad: x[indices(1, 2), indices(bad, 0)],
    "x[:, i]": lambda x, bad: x[:, indices(bad, 0)],
    "index_select": lambda x, bad: torch.index_select(x, 1, indices(bad, 0)),
    "gather": lambda x, bad: torch.gather(x, 0, torch.full((1, 7), bad)),
    "index_add": lambda x, bad: torch.index_add(x, 0, indices(bad), ROW),
    "index_copy": lambda x, bad: torch.index_copy(x, 1, indices(bad), COLUMN),
    "index_fill": lambda x, bad: torch.index_fill(x, 1, indices(bad), 2.0),
    "scatter": lambda x, bad: torch.scatter(x, 0, torch.full((1, 7), bad), 2.0),
    "index_put": lambda x, bad: x.index_put((indices(bad), indices(0)), torch.tensor(2.0)),
    "accumulate": lambda x, bad: x.index_put((indices(0), indices(bad)), torch.ones(1), True),
    "embedding": lambda x, bad: F.embedding(indices(bad, 0), x),
    "embedding_bag": lambda x, bad: F.embedding_bag(indices(bad, 0)[None], x, mode="sum"),
    "cross_entropy": lambda x, bad: F.cross_entropy(x, torch.full((7,), bad)),
    "nll_loss": lambda x, bad: F.nll_loss(x, torch.full((7,), bad)),
}


@pytest.mark.parametrize("which", OUT_OF_RANGE)
@pytest.mark.parametrize("name", CALLS)
def test_refused_on_every_rank(name, which):
    call, bad = CALLS[name], OUT_OF_RANGE[which]
    with pytest.raises((IndexError, RuntimeError)):
        call(TABLE, bad)

    def run(mesh):
        for placements in LAYOUTS:
            with pytest.raises((IndexError, RuntimeError)):
                call(distribute_tensor(TABLE, mesh, placements), bad)

    on_mesh((2, 2), run)


@pytest.mark.parametrize("index", [-9, -1, 6, 9])
def test_take_along_dim_takes_the_indices_that_torch_takes(index):
    indices = torch.full((7, 1), index)
    expected = torch.take_along_dim(TABLE, indices, 1)

    def run(mesh):
        for placements in LAYOUTS:
            x = distribute_tensor(TABLE, mesh, placements)
            assert torch.equal(torch.take_along_dim(x, indices, 1).full_tensor(), expected)

    on_mesh((2, 2), run)


def test_a_dim_without_elements_has_no_index():
    def run(mesh):
        x = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(1)])
        with pytest.raises(IndexError):
            x[torch.tensor([0]), torch.tensor([1])]

    on_mesh((4,), run)
