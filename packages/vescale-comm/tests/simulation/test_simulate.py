"""A simulated world is a world: the same results as processes, and none of their ways to hang.

torch.distributed, DeviceMesh, stock DTensor and FSDP2 run unmodified; each rank has generators of
its own; ranks that wait for ever, or disagree, are told at once where each of them is; nothing is
left behind.
"""

import os
import random
import sys
import threading
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
import vescale_comm as vc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from vescale_comm.testing import run as run_processes
from vescale_comm_worlds import run

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])


def every_call(rank, world_size):
    """What torch.distributed has for plain tensors, with values that every order sums alike.

    But for what the programs of UNMODIFIED.md call: objects, rings, groups of some.
    """
    peers = range(world_size)
    found = {}

    def x(*shape):
        return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).float() * (rank + 1)

    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        found[op] = x(3)
        dist.all_reduce(found[op], getattr(dist.ReduceOp, op))
    for op in ("BAND", "BOR", "BXOR"):
        found[op] = torch.tensor([rank, rank + 1])
        dist.all_reduce(found[op], getattr(dist.ReduceOp, op))
    found["broadcast"] = x(2)
    dist.broadcast(found["broadcast"], world_size - 1)
    found["reduce"] = x(2)
    dist.reduce(found["reduce"], 1)
    found["reduce"] = found["reduce"] if rank == 1 else None
    found["all_gather"] = [torch.zeros(2, 2) for _ in peers]
    dist.all_gather(found["all_gather"], x(2, 2))
    found["gather"] = [torch.zeros(2) for _ in peers] if rank == 1 else None
    dist.gather(x(2), found["gather"], dst=1)
    found["scatter"] = torch.zeros(2)
    dist.scatter(found["scatter"], [x(2) * p for p in peers] if rank == 0 else None, src=0)
    found["all_to_all"] = [torch.zeros(2) for p in peers]
    if TORCH >= (2, 13):  # gloo of torch 2.11 has none for lists
        dist.all_to_all(found["all_to_all"], [x(2) * p for p in peers])
    found["all_to_all_single"] = torch.zeros(world_size, 2)
    dist.all_to_all_single(found["all_to_all_single"], x(world_size, 2))
    found["reduce_scatter"] = torch.zeros(2)
    dist.reduce_scatter(found["reduce_scatter"], [x(2) * p for p in peers])
    found["async"] = x(3)
    work = dist.all_reduce(found["async"], async_op=True)
    work.wait()
    if rank == 0:
        sent = [x(1), x(1) + 1]
        works = [dist.isend(tensor, 1, tag=7 + i) for i, tensor in enumerate(sent)]
        for work in works:
            work.wait()
    if rank == 1:
        later, sooner = torch.zeros(1), torch.zeros(1)
        dist.recv(later, 0, tag=8)
        found["from"] = dist.recv(sooner, 0, tag=7)
        found["tags"] = [later, sooner]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_torch_distributed_has_the_results_of_processes(world_size):
    run(every_call, world_size)


def into_leaf(rank, world_size):
    tensor = torch.full((2,), float(rank), requires_grad=True)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return tensor.detach(), tensor.requires_grad, tensor.is_leaf


def test_a_message_is_received_into_a_leaf_as_in_processes():
    found = run(into_leaf, 2)
    assert found[1][0].tolist() == [0.0, 0.0]
    assert found[1][1:] == (True, True)


def distributed_tensors(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    w = torch.arange(48.0).view(6, 8)
    sharded = distribute_tensor(w, mesh, [Shard(0), Shard(1)])
    back = (sharded @ sharded.T).redistribute(mesh, [Replicate(), Shard(0)])
    sub = mesh["tp"]
    return back.to_local(), back.full_tensor(), sub.get_local_rank(), sub.get_group().size()


def test_stock_dtensor_and_meshes_run_again_and_again():
    for _ in range(2):
        for rank, (local, full, at, size) in enumerate(run(distributed_tensors, 4)):
            assert torch.equal(full[3 * (rank % 2) :][:3], local)
            assert (at, size) == (rank % 2, 2)


def test_each_rank_has_generators_of_its_own():
    def program(rank, world_size):
        torch.manual_seed(rank % 2)
        random.seed(rank % 2)
        numpy.random.seed(rank % 2)
        found = []
        for _ in range(3):
            dist.barrier()
            found += [torch.rand(1).item(), random.random(), numpy.random.rand()]
        return found

    found = vc.simulate(4)(program)
    assert found[0] == found[2] != found[1] == found[3]


def test_environment_warnings_and_traces_are_of_the_rank():
    def program(rank, world_size):
        os.environ["VESCALE_RANK"] = str(rank)
        with vc.trace() as t, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(3):
                if index < rank:
                    warnings.warn(f"{rank}.{index}", UserWarning, stacklevel=1)
                vc.barrier()
            vc.all_reduce(torch.ones(1))
        return os.environ["VESCALE_RANK"], t.counts()["all_reduce"], len(caught)

    assert vc.simulate(3)(program) == [(str(rank), 1, rank) for rank in range(3)]
    assert "VESCALE_RANK" not in os.environ


def test_all_blocked_is_reported_at_once_with_every_call_site():
    def program(rank, world_size):
        if rank == 1:
            return "left"
        if rank == 2:
            dist.recv(torch.zeros(1), 0)
        vc.all_reduce(torch.ones(2))

    with pytest.raises(vc.SimulationError) as caught:
        vc.simulate(4)(program)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {vc.DeadlockError}
    assert sorted(errors) == [0, 2, 3]
    text = str(errors[3])
    assert "rank 1 has returned" in text
    assert "rank 2 waits in recv(from rank 0)" in text
    assert "rank 0 waits in all_reduce(SUM) of torch.float32 (2,), number 0" in text
    assert text.count(f"{__file__}:") == 3


def test_what_a_rank_raised_is_the_cause_of_the_others_waiting():
    def program(rank, world_size):
        if rank == 1:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(vc.SimulationError) as caught:
        vc.simulate(3)(program)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "rank 1 raised KeyError: 'lost'" in str(caught.value.errors[0])


MISMATCHES = {
    "op": lambda rank: vc.all_reduce(torch.ones(2), op=["sum", "max"][rank]),
    "shape": lambda rank: vc.all_reduce(torch.ones(2 + rank)),
    "dtype": lambda rank: vc.all_reduce(torch.ones(2, dtype=[torch.float32, torch.int64][rank])),
    "call": lambda rank: vc.all_reduce(torch.ones(2)) if rank else dist.barrier(),
    "order": lambda rank: vc.all_reduce(torch.ones(2000), order=["native", "rank"][rank]),
    "fold": lambda rank: vc.all_reduce(torch.ones(2), order=["tree", "rank"][rank]),
    "wire": lambda rank: vc.all_reduce(torch.ones(2), wire=["fp8", "int8"][rank]),
    "avg": lambda rank: vc.all_reduce(torch.ones(2), op=["sum", "avg"][rank], order="rank"),
    "source": lambda rank: dist.broadcast(torch.ones(2), rank),
    "sizes": lambda rank: dist.all_to_all_single(
        torch.zeros(2), torch.zeros(2), [1, 1], [[1, 1], [2, 0]][rank]
    ),
    "gradient": lambda rank: vc.all_reduce(torch.ones(2, requires_grad=rank == 0)),
    "gradient, known": lambda rank: [
        vc.all_reduce(torch.ones(2)),  # from here on rank 1 takes the fast path
        vc.all_reduce(torch.ones(2, requires_grad=rank == 0)),
    ],
    "message": lambda rank: (
        dist.recv(torch.zeros(3), 0) if rank else [dist.send(torch.zeros(2), 1), dist.barrier()]
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_disagreement_is_named_and_not_a_hang(name):
    def program(rank, world_size):
        MISMATCHES[name](rank)

    with pytest.raises(vc.SimulationError) as caught:
        vc.simulate(2)(program)
    errors = caught.value.errors
    wrong = {1} if name == "message" else {0, 1}
    assert all(isinstance(errors[rank], vc.CommMismatchError) for rank in wrong)
    assert __file__ in str(errors[1]) or "member" in str(errors[1])
    if "gradient" in name:
        assert "the input of some requires a gradient" in str(errors[1])
        assert ", of an input that requires a gradient, at" in str(errors[1])


def test_nothing_is_left_behind():
    before = (torch.get_rng_state(), random.getstate(), sys.excepthook, threading.active_count())
    for program in (lambda rank, size: torch.rand(3), lambda rank, size: [][0]):
        try:
            vc.simulate(3)(program)
        except vc.SimulationError:
            assert program.__code__.co_consts
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert sys.excepthook is before[2]
    assert threading.active_count() == before[3]
    assert not dist.is_initialized()
    with pytest.raises(vc.CommError, match="no default process group"):
        vc.as_group(None)


def inside_a_world(rank, world_size):
    """A real process group does not notice a simulation that runs beside it."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    inner = vc.simulate(3)(lambda rank, world_size: vc.all_reduce(torch.tensor(float(rank))).item())
    return inner, vc.all_reduce(torch.tensor(1.0), vc.group_of(mesh, "dp")).item(), dist.get_rank()


def test_a_simulation_inside_of_a_real_world():
    assert run_processes(inside_a_world, 2) == [([3.0] * 3, 2.0, rank) for rank in range(2)]


def test_one_at_a_time_and_no_less_than_one_rank():
    def nested(rank, world_size):
        vc.simulate(1)(lambda rank, world_size: None)

    with pytest.raises(vc.SimulationError, match="a simulation is running in this process"):
        vc.simulate(2)(nested)
    with pytest.raises(vc.CommArgumentError, match="world_size is 0"):
        vc.simulate(0)


def test_a_call_from_another_thread_says_so():
    def program(rank, world_size):
        caught = []

        def call():
            try:
                dist.barrier()
            except vc.CommError as error:
                caught.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return caught

    for (message,) in vc.simulate(2)(program):
        assert "from a thread of its own" in message


def test_a_backward_stays_in_the_thread_of_its_rank():
    # Where nodes are of an accelerator as well: autograd then has threads of its own, from which no
    # rank may wait. The setting is of each thread, and no switch of ranks changes it.
    def program(rank, world_size):
        was = torch.autograd.set_multithreading_enabled(False).prev
        dist.barrier()
        return was, torch.autograd.set_multithreading_enabled(False).prev

    assert vc.simulate(2)(program) == [(False, False)] * 2
    # The caller's thread has its own.
    assert torch.autograd.set_multithreading_enabled(True).prev


def test_polling_lets_the_others_run():
    def program(rank, world_size):
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        return x.item()

    assert vc.simulate(3)(program) == [3.0] * 3


def test_polling_for_what_cannot_come_is_a_deadlock_too():
    def program(rank, world_size):
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            while not work.is_completed():
                pass
        dist.recv(torch.ones(1), 0)

    with pytest.raises(vc.SimulationError) as caught:
        vc.simulate(2)(program)
    text = str(caught.value.errors[0])
    assert "rank 0 waits in all_reduce(SUM) of torch.float32 (1,), number 0" in text
    assert "rank 1 waits in recv(from rank 0)" in text


def test_the_store_waits_for_other_ranks():
    def program(rank, world_size):
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            return store.get("key"), store.add("count", 1)
        store.set("key", "value")
        return store.check(["key"]), store.add("count", 1)

    assert vc.simulate(2)(program)[0][0] == b"value"
