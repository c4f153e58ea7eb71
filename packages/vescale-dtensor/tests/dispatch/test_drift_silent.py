"""Correct programs whose ranks do not all do the same run in silence, and send nothing more."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from vescale_comm import execution_log, testing, trace
from vescale_dtensor import DTensor, Replicate, Shard, capture, distribute_tensor


def mesh_of(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def settled():
    """Every rank compares all that it executed; nobody finds a difference."""
    comparison = execution_log(range(torch.distributed.get_world_size()))._comparison
    for _ in range(2):
        torch.distributed.barrier()
        assert comparison.look() is None
    return comparison.operations


def logging(rank, world_size):
    mesh = mesh_of(world_size)
    w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    for step in range(20):
        x = DTensor.from_local(torch.ones(2, 4) * rank, mesh, [Shard(0)])
        loss = (x @ w).square().mean()
        loss.backward()
        total = loss.detach().redistribute(placements=[Replicate()])
        if rank == 0:
            for _ in range(step):
                f"{(total * 100).item():.2f} {(w.detach() + 1).neg().norm().item()}"
            torch.rand(())
            torch.manual_seed(0)
    return settled()


def copies(rank, world_size):
    """Rank 0 copies what the others use as it is: values and gradients are the same."""
    mesh = mesh_of(world_size)
    w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    for step in range(6):
        x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]) + 1
        if rank == 0 and step % 2:
            x = x.clone()
        y = x @ w
        if rank == 0:
            y = y.clone().contiguous()
        y.add_(1)
        y.square().mean().backward()
        (w.grad * 2).sum().item()
        w.grad = None
    return settled()


def sub_meshes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["tp"]
    # Each row of the mesh is a program of its own.
    for _ in range(3 + 2 * (rank // 2)):
        x = distribute_tensor(torch.ones(4 + rank // 2, 4), mine, [Shard(0)])
        F.dropout(x, 0.5).sum().item()
    torch.manual_seed(1)
    F.dropout(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])).sum().item()
    return settled()


def uneven(rank, world_size):
    mesh = mesh_of(world_size)
    for extent in (1, 2, 5, 7, 0, 3) * 3:
        x = distribute_tensor(torch.ones(extent, 3).t().contiguous().t(), mesh, [Shard(0)])
        y = x.contiguous().reshape(-1) * 2
        (y.relu_() + 1).sum().item()
        x.t().contiguous().to(torch.float64).sum(1).full_tensor()
    return settled()


def recomputed(rank, world_size):
    mesh = mesh_of(world_size)
    w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    for _ in range(4):
        x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        for _ in range(2):  # gradients accumulate

            def part(x):
                return F.dropout(torch.relu(x @ w), 0.1)

            checkpoint(part, x, use_reentrant=False).sum().backward()
        w.grad = None
    return settled()


def captured(rank, world_size):
    mesh = mesh_of(world_size)
    w = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    once = [0]

    def step(x):
        w.add_(0.0)
        return F.dropout((x @ w).relu(), 0.5).sum()

    fast = capture(step, check=None)
    for index in range(6):
        if index == 3 and rank == 0:
            fast = capture(step, check=None)  # records again, alone
            fast._started = True  # as after a guard that failed here only
        x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        (fast(x) + w.sum()).item()
    return settled(), once


def caught(rank, world_size):
    mesh = mesh_of(world_size)
    for _ in range(4):
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        try:
            (x.sum() + 1).item()
            torch.mm(x, distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])).sum().item()
        except RuntimeError:
            pass
        with torch.no_grad():
            (x * 2).mean().item()  # an evaluation
    return settled()


def check(case, world_size=3):
    for outcome in testing.outcomes(case, world_size, timeout=120):
        assert isinstance(outcome, testing.Ok), outcome


@pytest.mark.parametrize("case", [logging, copies, uneven, recomputed, captured, caught])
def test_three_ranks(case):
    check(case)


def test_meshes_beside_each_other():
    check(sub_meshes, 4)


def counted(rank, world_size):
    mesh = mesh_of(world_size)
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    with trace() as seen:
        for _ in range(50):
            (x + 1).sum().item()
    operations = settled()
    for _ in range(500):
        (x + 1).sum().item()
    return len(seen.records), settled() - operations


def test_nothing_is_added_to_what_is_sent_and_little_to_the_store():
    for collectives, operations in testing.run(counted, 3, timeout=120):
        assert collectives == 50
        # Hundreds of steps that are known cost none; the rest is the thread's, a few a second.
        assert operations < 200
