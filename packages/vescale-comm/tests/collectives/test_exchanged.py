"""What is small is exchanged over gloo: with the bits of gloo's own way, whoever takes which."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from vescale_comm import graphs
from vescale_comm._engine import direct_exchange
from vescale_comm.testing import run
from vescale_comm_seen import Seen

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SHAPES = [(3,), (5, 4), (0, 2), (1,), (1024, 1025)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def values(rank, shape, dtype):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 4).to(dtype)


def gathered(rank, world_size):
    for shape in SHAPES:
        for dtype in DTYPES:
            x = values(rank, shape, dtype)
            of_torch = torch.empty((world_size * shape[0], *shape[1:]), dtype=dtype)
            gather_single(of_torch, x)
            into = torch.empty_like(of_torch)
            started = vc.all_gather_into_tensor(torch.empty_like(into), x, async_op=True)
            found = [
                vc.all_gather(x),
                vc.all_gather(x),
                vc.all_gather_into_tensor(into, x),
                started.wait(),
            ]
            assert all(torch.equal(one, of_torch) for one in found), (shape, dtype)
    # One member with a tensor that lies otherwise takes the long road, and meets the others.
    x = values(rank, (4, 6), torch.float32)
    lies = x.t().contiguous().t() if rank == 0 else x
    assert torch.equal(vc.all_gather(lies), vc.all_gather(x))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gather_has_the_values_of_torchs(size):
    run(gathered, size)


def summed(rank, world_size):
    for shape in [*SHAPES, ()]:
        for dtype in DTYPES[:4]:
            x = values(rank, shape, dtype)
            of_torch = x.clone()
            dist.all_reduce(of_torch)
            kept = x.clone()
            found = [vc.all_reduce(x), vc.all_reduce(x), vc.all_reduce(x, async_op=True).wait()]
            assert torch.equal(x, kept)
            own, later = x.clone(), x.clone()
            assert vc.all_reduce_(own) is own
            assert vc.all_reduce_(later, async_op=True).wait() is later
            assert all(torch.equal(one, of_torch) for one in [*found, own, later]), (shape, dtype)
    leaf = values(rank, (4,), torch.float32).requires_grad_()
    vc.all_reduce(leaf).sum().backward()
    assert leaf.grad.tolist() == [world_size] * 4


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_has_the_bits_of_torchs(size):
    run(summed, size)


def not_numbers(rank, world_size):
    # Two that differ in their bits: the sum has those of the first member's on both.
    x = torch.tensor([0x7FC00001 + rank], dtype=torch.int32).view(torch.float32)
    return vc.all_reduce(x).view(torch.int32).item()


def test_of_two_that_are_no_numbers_members_keep_the_same():
    first, second = run(not_numbers, 2)
    assert first == second


def folded(rank, world_size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in [(world_size * 3,), (world_size, 5)]:
            x = values(rank, shape, dtype)
            everyone = vc.all_gather(x).view(world_size, *shape).unbind()
            wide = [one.float() if dtype is torch.bfloat16 else one for one in everyone]
            total = wide[0]
            for one in wide[1:]:
                total = total + one
            own = total.tensor_split(world_size)[rank]
            for op, expected in (("sum", own), ("avg", own / world_size)):
                how = {"op": op, "order": "rank"}
                late = vc.reduce_scatter(x, async_op=True, **how)
                # The first one takes the long road.
                found = [vc.reduce_scatter(x, **how), vc.reduce_scatter(x, **how), late.wait()]
                assert all(torch.equal(one, expected.to(dtype)) for one in found), (dtype, op)
    x = values(rank, (world_size, 6), torch.float32)
    lies = x.t().contiguous().t() if rank == 0 else x
    assert torch.equal(
        vc.reduce_scatter(lies, order="rank"), vc.reduce_scatter(x.clone(), order="rank")
    )


@pytest.mark.parametrize("size", [2, 4])
def test_members_are_added_up_first_to_last(size):
    run(folded, size)


def of_graphs(rank, world_size):
    name = vc.as_group().tag
    ops = torch.ops._c10d_functional
    for shape in [(3,), (5, 4), (), (1024, 1025)]:
        x = values(rank, shape, torch.float32)
        kept = x.clone()
        with Seen() as seen:
            started = graphs.start_all_reduce(x, "sum", name)
        x.add_(1)  # a graph may write to what is under way
        found = graphs.finish(started)
        assert torch.equal(found, ops.wait_tensor(ops.all_reduce(kept, "sum", name)))
        exchanges = world_size == 2 and direct_exchange.is_small(kept)
        assert ("alltoall_base" in seen.names) == exchanges
        copied = kept.clone()
        again = graphs.finish(graphs.start_all_reduce(copied, "sum", name, owned=True))
        assert torch.equal(again, found)
        if shape:
            started = graphs.start_all_gather(kept, world_size, name)
            expected = ops.wait_tensor(ops.all_gather_into_tensor(kept, world_size, name))
            assert torch.equal(graphs.finish(started), expected)
    of_odd_tensors(rank, world_size, name)


def of_odd_tensors(rank, world_size, name):
    """What gloo's exchange has no number for, and what torch conjugates or negates lazily."""
    ops = torch.ops._c10d_functional
    z = torch.complex(values(rank, (4, 3), torch.float32), values(rank + 9, (4, 3), torch.float32))
    for x in (z, z.to(torch.complex128), z.conj(), z.real, z.conj().imag, z.real > 0):
        plain = x.resolve_conj().resolve_neg().contiguous()
        expected = ops.wait_tensor(ops.all_gather_into_tensor(plain, world_size, name))
        assert torch.equal(graphs.finish(graphs.start_all_gather(x, world_size, name)), expected)
        expected = ops.wait_tensor(ops.all_reduce(plain, "sum", name))
        assert torch.equal(graphs.finish(graphs.start_all_reduce(x, "sum", name)), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_a_graph_have_the_bits_of_torchs(size):
    run(of_graphs, size)


def test_what_is_large_or_elsewhere_goes_as_ever():
    small, empty = torch.ones(4), torch.empty(0)
    assert direct_exchange.gathers("gloo", small)
    assert not direct_exchange.gathers("gloo", empty)
    assert not direct_exchange.gathers("nccl", small)
    assert not direct_exchange.gathers(None, small)
    with patch.object(direct_exchange, "LARGEST", 15):
        assert not direct_exchange.gathers("gloo", small)
    sums = direct_exchange.sums_pair
    assert sums("gloo", 2, torch.float32, dist.ReduceOp.SUM)
    assert not sums("gloo", 3, torch.float32, dist.ReduceOp.SUM)
    assert not sums("gloo", 2, torch.float32, dist.ReduceOp.MAX)
    assert not sums("gloo", 2, torch.bfloat16, dist.ReduceOp.SUM)
    assert not sums("nccl", 2, torch.float32, dist.ReduceOp.SUM)
