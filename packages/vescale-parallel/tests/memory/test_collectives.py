"""Collectives keep one order on all ranks; what they read lives until somebody has waited."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vescale_comm import all_gather, all_reduce, reduce_scatter
from vescale_comm.testing import run
from vescale_parallel import mesh
from vescale_parallel._memory.tracing import trace_program
from vescale_parallel.memory import measured, plan


def on_a_rank(rank: int, world_size: int) -> tuple[list[str], bool]:
    """The collectives of a planned order, and whether it computes what the function does."""
    group = mesh(dp=world_size).get_group("dp")

    def function(x: Tensor, y: Tensor) -> Tensor:
        first, second = y * 2, x + 1
        # Ranks differ in what they compute besides, so their plans differ.
        extra = [(x * at).exp().sum() for at in range(3 * rank)]
        late = all_reduce(first, group)
        soon = all_reduce(second[:2], group)
        sums = soon.sum() + late.sum() + (first * 3).sum()
        return torch.stack([sums, *extra]).sum()

    inputs = torch.arange(64.0) + rank, torch.ones(128)
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    found = plan(graph)
    names = [name for name in found.order if name.startswith("all_reduce")]
    results: list[Any] = [function(*inputs), found.run(*inputs), found.apply()(*inputs)]
    of = trace_program(graph, None)
    users = [{of.nodes[at].name for at in one.users} for one in of.program.storages]
    # Made, and not what is read: that is copied at once.
    kept = sum({"all_reduce", "wait_tensor"} <= one for one in users) == 1
    return names, kept and all(torch.equal(one, results[0]) for one in results)


def reads_until_waited(rank: int, world_size: int) -> tuple[int, int]:
    """How many storages live until a wait: of a gather, and of a sum, whose input is written to.

    Of the gather: what it makes, what it reads, and what gloo gathers into.
    """
    group = mesh(dp=world_size).get_group("dp")
    ops: Any = torch.ops._c10d_functional
    x = torch.full((1 << 20,), rank + 1.0)
    for call in (ops.all_reduce, ops.broadcast):
        started = call(x, *(("sum",) if call is ops.all_reduce else (0,)), group.group_name)
        x.fill_(-7)  # if it were read now, the result would show it
        done = ops.wait_tensor(started)
        assert torch.equal(done, torch.full_like(x, 3.0 if call is ops.all_reduce else 1.0))
        x.fill_(rank + 1)
    found = []
    for call in (all_gather, all_reduce):
        function = partial(lambda call, x: call(x * 2, group) + 1, call)
        of = trace_program(make_fx(function, tracing_mode="fake")(torch.ones(4)), None)
        users = [{of.nodes[at].name for at in one.users} for one in of.program.storages]
        found.append(sum("wait_tensor" in one for one in users))
    return found[0], found[1]


def test_what_is_sent_lives_until_it_was_copied_or_waited_for():
    assert run(reads_until_waited, 2) == [(3, 1)] * 2


def test_what_several_gathers_of_one_call_read_lives_until_the_first_wait():
    ops: Any = torch.ops._c10d_functional

    def function(x: Tensor, y: Tensor) -> Tensor:
        gathered = ops.all_gather_into_tensor_coalesced([x * 2, y * 3], 2, "0")
        return sum(ops.wait_tensor(one).sum() for one in gathered)

    of = trace_program(make_fx(function, tracing_mode="fake")(torch.ones(4), torch.ones(3)), None)
    lives = {one.name: {of.nodes[at].name for at in one.users} for one in of.program.storages}
    assert all({"wait_tensor", "wait_tensor_1"} <= lives[name] for name in ("mul", "mul_1"))


def taken(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Planned and counted bytes of steps that gather and scatter, and what the tensors have."""
    group = mesh(dp=world_size).get_group("dp")
    functions = [
        lambda x: all_gather(x * 2, group) + 1,
        lambda x: reduce_scatter(x * 2, group) + 1,
        lambda x: all_reduce(x * 2, group) + 1,
    ]
    x = torch.ones(3 << 15)
    found = []
    for function in functions:
        graph = make_fx(function, tracing_mode="fake")(x)
        planned = plan(graph, solver="rules", seconds=0)
        with torch.no_grad():
            # The least: gloo's thread lets go of what it has sent a little after it tells.
            counted = min(measured(partial(graph, x)).peak for _ in range(5))
        found.append((planned.program_peak, counted, x.nbytes))
    return found


def test_what_backends_take_for_themselves_is_planned():
    for ranks in (2, 3):
        for found in run(taken, ranks):
            for planned, counted, _ in found:
                assert abs(planned - counted) <= 0.02 * planned, found
            # gloo gathers into memory of its own, and copies what it sums up.
            gathered, scattered, _ = found
            assert gathered[0] == (2 * ranks + 1) * gathered[2]
            assert scattered[0] > 2 * scattered[2]


def test_ranks_agree():
    for names, right in run(on_a_rank, 2):
        assert names == ["all_reduce", "all_reduce_1"]
        assert right
