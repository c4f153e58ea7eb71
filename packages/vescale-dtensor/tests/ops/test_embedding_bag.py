"""A bag of a table that is sharded by rows adds up its own rows, and no other.

A row that is not finite stays in the bags that look it up, forward and backward, and lengths of
bags are exact in half precision.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from on_mesh import on_mesh
from vescale_dtensor import Replicate, Shard, distribute_tensor

NAN, INF = float("nan"), float("inf")
BAGS = torch.tensor([[0, 3, 3], [4, 1, 2], [2, 2, 0], [6, 5, 1]])
SHARDED = [[Shard(0), Replicate()], [Shard(0), Shard(0)], [Shard(0), Shard(1)]]


def table(dtype=torch.float32):
    rows = torch.arange(21, dtype=dtype).reshape(7, 3) / 4
    rows[0, 1], rows[4] = NAN, torch.tensor([INF, -INF, NAN], dtype=dtype)
    return rows


def looked_up(place, mode, padding, listed, weighted):
    weight = place(table()).requires_grad_()
    shares = torch.linspace(-1, 2, 12).reshape(4, 3).requires_grad_() if weighted else None
    index, offsets = (BAGS.flatten(), torch.tensor([0, 2, 2, 9])) if listed else (BAGS, None)
    found = F.embedding_bag(
        index,
        weight,
        offsets,
        mode=mode,
        padding_idx=padding,
        per_sample_weights=shares.flatten() if listed and weighted else shares,
    )
    whole = found.full_tensor() if hasattr(found, "full_tensor") else found
    whole.nan_to_num(0.0, 0.0, 0.0).square().sum().backward()
    grads = [weight.grad, None if shares is None else shares.grad]
    return [whole.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_rows_that_are_not_finite(mode):
    kind = ("sum", True) if mode == "weighted" else (mode, False)

    def run(mesh):
        for listed, padding, placements in itertools.product((False, True), (None, 0, 4), SHARDED):
            expected = looked_up(lambda x: x, kind[0], padding, listed, kind[1])
            found = looked_up(
                lambda x, at=placements: distribute_tensor(x, mesh, at),
                kind[0],
                padding,
                listed,
                kind[1],
            )
            torch.testing.assert_close(found, expected, equal_nan=True)

    on_mesh((2, 2), run)


def test_lengths_in_half_precision():
    # Ones that are added up in bfloat16 do not come beyond 256.
    index = torch.arange(1000).remainder(4).reshape(1, 1000)
    rows = torch.arange(1, 5, dtype=torch.bfloat16).reshape(4, 1)

    def run(mesh):
        found = F.embedding_bag(index, distribute_tensor(rows, mesh, [Shard(0)]), mode="mean")
        assert found.full_tensor().item() == 2.5

    on_mesh((4,), run)
