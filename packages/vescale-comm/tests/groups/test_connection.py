"""No message is the first call of a group over NCCL, whose communicator all members make.

Groups of a simulation that say they are of NCCL: what is asked is the order of torch's calls.
"""

import dataclasses
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from vescale_comm._groups import connection, group, new_group
from vescale_comm.testing import run

CALLS = ("all_reduce", "broadcast", "batch_isend_irecv", "isend", "irecv")
FIRST = ["all_reduce", "batch_isend_irecv"]


@pytest.fixture
def calls(monkeypatch):
    """By rank, which of these are called, in their order."""
    found, lists = defaultdict(list), []

    def noting(name):
        call = getattr(dist, name)

        def called(*args, **kwargs):
            if not lists:  # what a list holds is in the call of the list
                found[dist.get_rank()].append(name)
            if name != FIRST[1]:
                return call(*args, **kwargs)
            lists.append(args)
            try:
                return call(*args, **kwargs)
            finally:
                lists.pop()

        return called

    for name in CALLS:
        called = noting(name)
        monkeypatch.setattr(dist, name, called)
        monkeypatch.setattr(dist.distributed_c10d, name, called)
    return found


def of_nccl(made):
    return dataclasses.replace(made, backends={"cpu": "nccl"})


def test_a_permutation_that_leaves_some_out_is_not_the_first_call(calls):
    def program(rank, size):
        group = of_nccl(vc.as_group())
        for _ in range(2):
            found = vc.permute(torch.tensor([rank + 1.0]), group, pairs=[(0, 1)])
        return found.tolist()

    assert vc.simulate(3)(program) == [[0.0], [1.0], [0.0]]
    # The list of the one that takes part in nothing is empty, and torch is not called for it.
    assert [calls[rank] for rank in range(3)] == [[*FIRST, FIRST[1]], [*FIRST, FIRST[1]], FIRST[:1]]


def test_a_scatter_is_not_the_first_call(calls):
    def program(rank, size):
        return vc.scatter(torch.arange(6.0), of_nccl(vc.as_group()), source=0).tolist()

    assert vc.simulate(3)(program) == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert [calls[rank] for rank in range(3)] == [FIRST] * 3


@pytest.mark.parametrize("connected", [False, True])
def test_a_message_of_two_is_between_two_until_all_have_called(calls, connected):
    def program(rank, size):
        group = of_nccl(vc.as_group())
        if connected:
            vc.broadcast(torch.zeros(1), group, source=0)
        if rank == 0:
            vc.send(torch.ones(1), group, target=1)
        elif rank == 1:
            assert vc.recv(torch.zeros(1), group, source=0).item() == 1
        return connection.connects_late(group, "cpu")

    assert vc.simulate(3)(program) == [not connected] * 3
    first = ["broadcast"] if connected else []
    assert calls[0] == [*first, FIRST[1] if connected else "isend"]
    assert calls[1] == [*first, FIRST[1] if connected else "irecv"]
    assert calls[2] == first


def test_a_group_over_axes_is_connected_when_it_is_made(calls, monkeypatch):
    monkeypatch.setattr(group, "_backends_of", lambda process_group: {"cpu": "nccl"})

    def program(rank, size):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        late = [vc.group_of(mesh, axes) for axes in ("dp", ("dp", "tp"))]
        calls[rank].clear()
        lane = vc.group_of(mesh, "tp", lane=1)
        asked = list(calls[rank])
        assert vc.group_of(mesh, "tp", lane=1) is lane
        return [connection.connects_late(one, "cpu") for one in (*late, lane)], asked

    for late, asked in vc.simulate(4)(program):
        # One that is there already has been made by torch, by whomever.
        assert late == [True, True, False]
        assert asked[-1] == "all_reduce"


def bound_while_made(rank, size):
    seen = []
    make = dist.new_group

    def noted(*args, **kwargs):
        seen.append(world.bound_device_id)
        return make(*args, **kwargs)

    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", rank)
    dist.new_group = noted
    try:
        new_group._new_group([0, 1], dist.get_backend_config())
    finally:
        dist.new_group = make
        bound, world.bound_device_id = world.bound_device_id, None
    return seen, bound


def test_the_world_is_not_split_for_a_group_of_some():
    # What torch does where it is bound: "we need to call `ncclCommSplit` on *all* ranks in this new
    # group's parent group".
    assert run(bound_while_made, 2) == [([None], torch.device("cuda", rank)) for rank in range(2)]


def test_a_barrier_of_nccl_alone_says_where_it_is(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert connection.barrier_devices({"cuda": "nccl"}) == [3]
    assert connection.barrier_devices({"cpu": "gloo", "cuda": "nccl"}) is None


class Options(TorchDispatchMode):
    """Whether the calls of torch below say that they are waited for at once."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
            self.found.append((func._schema.name, given.get("async_op", True)))
        return func(*args, **(kwargs or {}))


def at_once(rank, size):
    group, x = vc.as_group(), torch.ones(3 << 12)
    # The first calls go the long way and remember what the next ones need.
    for _ in range(2):
        with Options() as seen:
            vc.all_reduce(x, group)
            vc.reduce_scatter(x, group)
    return seen.found


def test_calls_that_are_waited_for_say_so():
    for found in run(at_once, 3):
        assert {name.rstrip("_") for name, _ in found} >= {"c10d::allreduce"}
        assert len(found) >= 2
        assert not any(later for _, later in found), found
