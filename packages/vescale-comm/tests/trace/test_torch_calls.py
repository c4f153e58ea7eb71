"""What torch.distributed issues beside a trace is counted, and recorded where that is asked."""

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from vescale_comm import fsdp2
from vescale_comm.testing import on_ranks, run

RANKS = 3


def ones(*shape):
    return torch.ones(*shape)


def pieces(at=0, rank=0):
    return [ones(2 + i) for i in range(RANKS)] if rank == at else None


def functional(name, *args):
    """Call one of those that traced graphs have, on the default group."""
    ops = torch.ops._c10d_functional
    ops.wait_tensor(getattr(ops, name)(*args, dist.group.WORLD.group_name))


def messages(rank):
    near = (rank + 1) % RANKS
    sending = dist.isend(ones(5), near)
    dist.recv(ones(5), (rank - 1) % RANKS)
    sending.wait()


# torch's calls by the op that is recorded, and the bytes that each of three ranks sends.
CALLS = {
    "all_reduce": (lambda r: dist.all_reduce(ones(6)), [32] * 3),
    "all_reduce functional": (lambda r: functional("all_reduce", ones(6), "sum"), [32] * 3),
    "all_gather": (lambda r: dist.all_gather([ones(6) for _ in range(3)], ones(6)), [48] * 3),
    "all_gather one": (lambda r: single_gather(ones(18), ones(6)), [48] * 3),
    "all_gather functional": (lambda r: functional("all_gather_into_tensor", ones(6), 3), [48] * 3),
    "reduce_scatter": (lambda r: dist.reduce_scatter(ones(2 + r), pieces(r, r)), [28, 24, 20]),
    "reduce_scatter one": (lambda r: single_scatter(ones(2), ones(6)), [16] * 3),
    "reduce_scatter functional": (
        lambda r: functional("reduce_scatter_tensor", ones(6), "sum", 3),
        [16] * 3,
    ),
    "all_to_all": (
        lambda r: dist.all_to_all_single(ones(3 * (1 + r)), ones(6), [1 + r] * 3, SPLITS),
        [20, 16, 12],
    ),
    "all_to_all even": (lambda r: dist.all_to_all_single(ones(6), ones(6)), [16] * 3),
    "all_to_all functional": (
        lambda r: functional("all_to_all_single", ones(6), [2] * 3, [2] * 3),
        [16] * 3,
    ),
    "broadcast": (lambda r: dist.broadcast(ones(5), 1), [0, 40, 0]),
    "reduce": (lambda r: dist.reduce(ones(5), 2), [20, 20, 0]),
    "gather": (
        lambda r: dist.gather(ones(5), [ones(5) for _ in range(3)] if r == 1 else None, 1),
        [20, 0, 20],
    ),
    "scatter": (lambda r: dist.scatter(ones(4), [ones(4)] * 3 if r == 2 else None, 2), [0, 0, 32]),
    "barrier": (lambda r: dist.barrier(), [0] * 3),
    "send recv": (messages, [20] * 3),
}
SPLITS = [1, 2, 3]
single_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
single_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@on_ranks(RANKS)
def test_each_call_of_torch_is_recorded_or_counted(rank, world_size):
    for name, (call, expected) in CALLS.items():
        with vc.trace(torch=True) as t:
            call(rank)
        ops = [word for word in name.split() if word not in ("one", "even", "functional")]
        assert [record.op for record in t.records] == ops, name
        assert t.bytes() == expected[rank], name
        assert {record.ranks for record in t.records} == {(0, 1, 2)}
        assert all(record.of_torch and record.end for record in t.records)
        assert t.unrecorded == {}
        with (
            pytest.warns(UserWarning, match=r"over ranks 0-2\), and are in no"),
            vc.trace() as blind,
        ):
            call(rank)
        assert (blind.records, list(blind.unrecorded)) == ([], ["ranks 0-2"])
        # gloo makes several of the first one: its own count is told.
        count = blind.unrecorded["ranks 0-2"]
        assert count == len(ops) or (name == "reduce_scatter" and count > 1), name
        assert f"not this package's: {count} over ranks 0-2" in blind.table()


def own(rank):
    vc.all_reduce(vc.all_gather(torch.ones(6, requires_grad=True))).sum().backward()
    vc.reduce_scatter(torch.ones(6), order="rank")
    vc.all_to_all([torch.ones(2)] * RANKS, shapes=[(2,)] * RANKS)
    vc.scatter(torch.ones(6), source=0)
    vc.barrier()


def packages_own(rank, world_size):
    own(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with vc.trace(torch=True, align=True) as outer, vc.trace(align=True) as inner:
            own(rank)
    return outer.records == inner.records, any(one.of_torch for one in outer.records)


def test_what_this_package_issues_is_recorded_once():
    assert run(packages_own, RANKS) == [(True, False)] * RANKS


def stock_training(rank, world_size):
    found = []
    for install in (False, True):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (world_size,))
        for one in (*module, module):
            fully_shard(one, mesh=mesh)
        if install:
            fsdp2.install(module)
        with vc.trace(torch=True) as outer, vc.trace(torch=True) as inner:
            module(torch.ones(2, 8)).sum().backward()
        assert outer.records == inner.records
        kinds = Counter((one.op, one.of_torch) for one in outer.records)
        found.append((dict(kinds), outer.bytes(), outer.unrecorded))
    replica = DistributedDataParallel(nn.Linear(4, 4))
    with vc.trace(torch=True) as t:
        replica(torch.ones(2, 4)).sum().backward()
    return *found, (t.counts(), t.bytes(), t.unrecorded)


def test_stock_fsdp2_and_ddp_are_traced_in_forward_and_backward():
    for stock, installed, replicated in run(stock_training, 2):
        gathers, shard = {("all_gather", True): 4}, 4 * 72 // 2
        assert stock == (gathers | {("reduce_scatter", True): 2}, 6 * shard, {})
        assert installed == (gathers | {("reduce_scatter", False): 2}, 6 * shard, {})
        assert replicated == ({"all_reduce": 1}, 80, {})


def test_calls_of_a_simulated_rank_are_counted():
    def program(rank, world_size):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            with vc.trace() as t:
                vc.all_reduce(torch.ones(2))
                dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1, 2]))
        return t.counts(), sum(t.unrecorded.values())

    assert vc.simulate(3)(program) == [({"all_reduce": 1}, 1)] * 3
