"""Blocks of other sizes than each other: q, k and v of grouped heads are sharded one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import vescale_dtensor as vd
from vescale_comm import simulate, trace
from vescale_comm.testing import device_mesh
from vescale_dtensor import InterleavedShard, LayoutError, Partial, RaggedShard, Replicate, Shard


def expected(whole: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int, count: int) -> Any:
    blocks = whole.split([whole.shape[dim] // sum(sizes) * one for one in sizes], dim)
    parts = []
    for block in blocks:
        chunks = block.chunk(count, dim)
        parts += [chunks[rank]] if rank < len(chunks) else []
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_any_proportions_go_anywhere_and_back(seed: int):
    draws = random.Random(seed)
    cases = []
    for _ in range(6):
        dim = draws.randint(0, 1)
        sizes = tuple(draws.randint(1, 4) for _ in range(draws.randint(2, 4)))
        shape = [draws.randint(1, 5), draws.randint(1, 5)]
        shape[dim] = sum(sizes) * draws.randint(1, 3)
        cases.append((dim, sizes, tuple(shape)))

    def on_a_rank(rank: int, count: int) -> None:
        mesh = device_mesh((count,))
        for dim, sizes, shape in cases:
            whole = torch.arange(float(shape[0] * shape[1])).view(shape)
            placement = InterleavedShard(dim, sizes)
            made = vd.distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            # In lowest terms; of equal ones, their number.
            least = placement.blocks
            proportions = (1,) * least if isinstance(least, int) else least
            assert torch.equal(made.to_local(), expected(whole, dim, proportions, rank, count))
            assert torch.equal(made.full_tensor(), whole)
            for other in (Shard(0), Shard(1), Partial(), RaggedShard((0, 1), (1,) * count)):
                if isinstance(other, RaggedShard) and whole.numel() % count:
                    continue
                there = made.redistribute(mesh, [other])
                assert torch.equal(there.redistribute(mesh, [placement]).full_tensor(), whole)

    simulate(3)(on_a_rank)


def test_grouped_heads_are_sliced_in_place():
    """Forward and backward of q, k and v, cut apart, sends sums of gradients only."""

    def on_a_rank(rank: int, count: int) -> None:
        mesh = device_mesh((count,))
        torch.manual_seed(0)
        x, weight = torch.randn(2, 3, 8), torch.randn(32, 8, requires_grad=True)
        sizes = (16, 8, 8)
        placed = vd.distribute_tensor(
            weight.detach(), mesh, [InterleavedShard(0, sizes)], src_data_rank=None
        ).requires_grad_()
        given = vd.distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)

        def heads(x: Any, weight: Any) -> Any:
            found = torch.nn.functional.linear(x, weight)
            q, k, v = found[..., :16], found[..., 16:24], found[..., 24:]
            q, k, v = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in (q, k, v))
            k, v = (one.repeat_interleave(2, 1) for one in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        with trace() as seen:
            found = heads(given, placed)
            found.sum().backward()
        assert {one.op for one in seen.records} <= {"all_reduce"}
        assert found.placements == (Shard(1),)
        plain = heads(x, weight)
        plain.sum().backward()
        torch.testing.assert_close(found.full_tensor(), plain)
        torch.testing.assert_close(placed.grad.full_tensor(), weight.grad)

    simulate(2)(on_a_rank)


def test_proportions_are_values():
    assert InterleavedShard(0, (8, 2, 2)) == InterleavedShard(0, [4, 1, 1])
    assert hash(InterleavedShard(0, (8, 2, 2))) == hash(InterleavedShard(0, (4, 1, 1)))
    assert InterleavedShard(1, (5, 5, 5)) == InterleavedShard(1, 3)
    assert repr(InterleavedShard(0, (4, 2))) == "InterleavedShard(0, (2, 1))"
    for wrong in ((), (1, 0), (2, -1), (1, 1.5), "ab"):
        with pytest.raises(LayoutError):
            InterleavedShard(0, wrong)
    with pytest.raises(LayoutError, match="not a multiple of 3 blocks"):
        InterleavedShard(0, (2, 1)).pieces(4, 2)
