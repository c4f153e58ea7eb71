"""A program that destroys its process groups and makes new ones keeps nothing of the old ones.

A mesh that a cache keeps has sockets and threads, and those of gloo spin once they are closed.
Calls on one mesh are counted alike on all its ranks, whatever a rank does on other meshes.
"""

import ast
import gc
import multiprocessing
import os
import socket
import weakref
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import vescale_dtensor as vd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from vescale_comm import simulate
from vescale_comm.testing import device_mesh, run
from vescale_dtensor import DTensor, Replicate, Shard
from vescale_dtensor._fast_path import cache
from vescale_dtensor._layout.first_uses import FirstUses

SIZE, ROUNDS = 2, 4
SOURCES = Path(vd.__file__).parent
HOLDERS = {"Layout", "Spec", "ById", "DeviceMesh", "OpCall"}


def train(mesh, rank):
    """Ops of every kind that is cached: known and new, planned, replicated, random, compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
    vd.distribute_module(model, mesh)
    model[0].weight = nn.Parameter(vd.distribute_tensor(model[0].weight.data, mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters())
    x = vd.distribute_tensor(torch.randn(5, 8), mesh, [Shard(0)])
    for _ in range(3):
        (model(x) + torch.ones(8)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    y = DTensor.from_local(torch.ones(4 - rank, 2), mesh, [Shard(0)])
    torch.linalg.svdvals(y)
    torch.kron(y, y).sum().item()
    z = vd.randn(6, 4, device_mesh=mesh, placements=[Shard(0)])
    z.uniform_()[1:3].redistribute(placements=[Replicate()])
    with vd.explain():
        (z.cumsum(0) + z).full_tensor()


def rounds(rank, ports, folder):
    torch.set_num_threads(1)
    held, threads = [], []
    for port in ports:
        place = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=SIZE)
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
        train(mesh, rank)
        held += [weakref.ref(mesh), weakref.ref(mesh.get_group())]
        del mesh
        threads.append(len(os.listdir("/proc/self/task")))
        dist.destroy_process_group()
    # The last one is replaced by no other.
    gc.collect()
    alive = sum(each() is not None for each in held)
    threads.append(len(os.listdir("/proc/self/task")))
    Path(folder, str(rank)).write_text(f"{alive} {threads[1]} {threads[-1]}")


def test_destroyed_worlds_are_let_go(tmp_path):
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(ROUNDS)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in free]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing", "vescale_dtensor"])
    ranks = [
        context.Process(target=rounds, args=(rank, ports, str(tmp_path)), daemon=True)
        for rank in range(SIZE)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(240)  # most of it imports
        assert [each.exitcode for each in ranks] == [0] * SIZE
    finally:
        for each in ranks:
            each.kill()
    for rank in range(SIZE):
        alive, early, late = map(int, (tmp_path / str(rank)).read_text().split())
        assert alive == 0
        assert late <= early


def another_mesh_in_one_world(rank, world):
    """Further meshes of one world empty nothing; returns whether a known call stayed known."""
    x = vd.distribute_tensor(torch.ones(4), device_mesh((world,)), [Shard(0)])
    _ = x + x
    known = set(cache.GRAD_IDLE) | set(cache.IDLE_CALLS.pairs)
    for _ in range(2):
        other = init_device_mesh("cpu", (world,))
        vd.distribute_tensor(torch.ones(4), other, [Shard(0)])
    gc.collect()
    return bool(known) and known <= set(cache.GRAD_IDLE) | set(cache.IDLE_CALLS.pairs)


def test_within_a_world_nothing_is_emptied():
    assert run(another_mesh_in_one_world, 2) == [True, True]


def kept_for_good(tree):
    """Functions of what holds a mesh that are under `lru_cache`, which nothing empties."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(each) for each in node.decorator_list}
            arguments = [each.annotation for each in node.args.args if each.annotation]
            names = {n.id for a in arguments for n in ast.walk(a) if isinstance(n, ast.Name)}
            if any("cache(" in each for each in decorators) and names & HOLDERS:
                yield node.name


@pytest.mark.parametrize("text", ["@lru_cache(maxsize=1)\ndef f(layout: Layout): ..."])
def test_the_check_finds_what_it_looks_for(text):
    assert list(kept_for_good(ast.parse(text))) == ["f"]


def test_no_cache_of_what_holds_a_mesh_is_kept_for_good():
    found = {
        f"{path.name}: {name}"
        for path in SOURCES.rglob("*.py")
        if "lru_cache" in path.read_text()
        for name in kept_for_good(ast.parse(path.read_text()))
    }
    assert not found, f"decorate them with _torch.worlds.cached: {found}"


class Mesh:
    """Stands for a mesh: counts go by identity."""


def counted(uses, mesh, kind):
    over = uses.is_over(mesh, kind)
    if not over:
        uses.add(mesh, kind)
    return not over


def test_the_first_calls_of_a_kind_are_counted():
    uses, mesh = FirstUses(2, most_kinds=8), Mesh()
    assert [counted(uses, mesh, "a") for _ in range(4)] == [True, True, False, False]
    assert counted(uses, mesh, "b")
    assert counted(uses, Mesh(), "a")
    uses.clear()
    assert counted(uses, mesh, "a")


def test_the_bound_is_that_of_each_mesh():
    """One for all meshes would be reached earlier by a rank that is a member of more of them."""
    uses, mesh, other = FirstUses(1, most_kinds=3), Mesh(), Mesh()
    for kind in range(9):
        assert counted(uses, other, kind) == (kind < 3)
    assert [counted(uses, mesh, kind) for kind in range(4)] == [True, True, True, False]


def test_counts_go_with_their_mesh():
    uses = FirstUses(1, most_kinds=3)
    for _ in range(50):
        assert counted(uses, Mesh(), "a")
    gc.collect()
    uses.is_over(last := Mesh(), "a")
    assert len(uses._meshes) <= 2
    assert not uses.is_over(last, "a")


def compares_on_one_mesh(rank, world_size):
    mesh = device_mesh((2, 1), ("dp", "own"))
    x = vd.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    if rank:
        alone = vd.distribute_tensor(torch.ones(2, 2), mesh["own"], [Replicate()])
        for func, dims, dtype in product(FUNCTIONS, range(1, 16), DTYPES):
            func(alone, torch.ones((1,) * dims, dtype=dtype))
    for func in FUNCTIONS:
        with pytest.raises(vd.DisagreementError):
            func(x, torch.full((4,), float(rank)))
    assert vd.DTensor.from_local(torch.ones(2 - rank, 2), mesh, x.placements).shape == (3, 2)


FUNCTIONS = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)
DTYPES = (torch.float32, torch.float64, torch.int32)


def test_a_rank_that_has_used_more_meshes_compares_like_the_others():
    simulate(2)(compares_on_one_mesh)
    assert len(FUNCTIONS) * 15 * len(DTYPES) > 256
