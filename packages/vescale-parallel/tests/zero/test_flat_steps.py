"""Optimizers that go element by element step whole buffers, with the bits of one step a parameter.

Two copies of a model are trained alike. A hook of its own, which does nothing, lets the optimizer
of the second step its parameters one by one. Between steps all is done that a program may do.
"""

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import stepped_pairs
import torch
from stepped_pairs import (
    CHANGES,
    OPTIMIZERS,
    Pair,
    backward,
    require_alike,
    require_whole_after_errors,
    step,
    train_changed,
    train_scaled,
)
from torch import nn, optim
from vescale_comm import execution_log, simulate
from vescale_comm.testing import WorkerError, run
from vescale_parallel import Plan, forward_backward, parallelize
from vescale_parallel import mesh as make_mesh
from zero_models import batch, distributed, local, make, schedule_of, train

DP, DP_TP, HSDP = {"dp": 4}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}


def twins(sizes: dict[str, int], zero: int, optimizer: Any) -> tuple[Pair, Pair]:
    build = partial(distributed, sizes=sizes, zero=zero)
    return stepped_pairs.twins(lambda: build(make(blocks=2, width=13)), optimizer)


def is_flat(pair: Pair, key: str = "exp_avg") -> bool:
    """Whether states of all parameters of a buffer lie in one memory."""
    model, optimizer = pair
    buffers = [b for unit in schedule_of(model).units for b in unit.buffers]
    homes = [
        {local(optimizer.state[p][key]).untyped_storage().data_ptr() for p in buffer.parameters}
        for buffer in buffers
    ]
    return all(len(one) == 1 for one in homes)


def trained_alike(rank: int, world_size: int, sizes: dict[str, int], zero: int, name: str) -> None:
    one, two = twins(sizes, zero, OPTIMIZERS[name])
    for seed in range(4):
        step(one, seed)
        step(two, seed)
        require_alike(one, two)
    if name.startswith("Adam"):
        assert is_flat(one)
        assert not is_flat(two)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("sizes", "zero"), [(DP, 3), (DP_TP, 2), (HSDP, 1)], ids=str)
def test_the_bits_of_a_step_of_each_parameter(sizes: dict[str, int], zero: int, name: str):
    simulate(prod(sizes.values()))(trained_alike, sizes, zero, name)


def fused(rank: int, world_size: int) -> None:
    """torch's fused kernels on CPUs round by where an element lies, so not to the bit."""
    kinds: dict[str, Any] = {
        "AdamW": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
        "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    }
    for build in kinds.values():
        one, two = twins(DP, 3, build)
        for seed in range(4):
            step(one, seed)
            step(two, seed)
        for p, q in zip(one[0].parameters(), two[0].parameters(), strict=True):
            torch.testing.assert_close(local(p), local(q), rtol=1e-5, atol=1e-6)
    model, plain = distributed(make(), DP, 3), make()
    losses = [train(each, 4, kinds["AdamW"]) for each in (model, plain)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=1e-6)


def test_fused_kernels():
    simulate(4)(fused)


def changed(rank: int, world_size: int, change: Callable[[Pair, int], None]) -> None:
    train_changed(twins(DP, 3, OPTIMIZERS["AdamW"]), change)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_backward_and_step(change: Callable[[Pair, int], None]):
    simulate(4)(changed, change)


def widened(rank: int, world_size: int) -> None:
    pairs = twins(DP, 3, OPTIMIZERS["SGD, momentum"])
    for seed in range(4):
        for pair in pairs:
            if seed == 2:
                pair[0].double()
                pair[1].state.clear()
            step(pair, seed)
        require_alike(*pairs)


def test_models_that_change_their_dtype():
    simulate(4)(widened)


def raised(rank: int, world_size: int) -> None:
    require_whole_after_errors(twins(DP, 3, OPTIMIZERS["AdamW"]))


def test_a_step_that_raises():
    simulate(4)(raised)


def stale(rank: int, world_size: int) -> None:
    one, _ = twins(DP, 3, OPTIMIZERS["AdamW"])
    for seed in range(3):
        step(one, seed)
    loss = one[0](*batch(0))
    one[1].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_of_before_the_step_is_refused():
    simulate(4)(stale)


def saved(rank: int, world_size: int) -> None:
    """A copy of model and optimizer, and a loaded state, go on by themselves."""
    one, two = twins(DP, 3, OPTIMIZERS["AdamW"])
    for seed in range(3):
        step(one, seed)
        step(two, seed)
    copied = copy.deepcopy(one)
    step(one, 3)
    step(copied, 3)
    step(two, 3)
    require_alike(one, two)
    require_alike(copied, two)
    step(copied, 4)
    require_alike(one, two)


def test_copies():
    run(saved, 4)


def scaled(rank: int, world_size: int) -> None:
    """A fused step that takes the loss scale out takes it out of what parameters hold."""
    for assigned in (False, True):
        pairs = twins(DP, 3, partial(optim.SGD, lr=1e-2, fused=True))
        for pair in pairs:
            train_scaled(pair, assigned)
        for p, q in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            torch.testing.assert_close(local(p), local(q))
            torch.testing.assert_close(local(p.grad), local(q.grad))


def test_loss_scales():
    simulate(4)(scaled)


def drifting(rank: int, world_size: int) -> None:
    pair, _ = twins(DP, 3, OPTIMIZERS["AdamW"])
    for seed in range(10):
        backward(pair, seed)
        nn.utils.clip_grad_norm_(pair[0].parameters(), 1.0)
        if seed != 4 or rank != 1:
            pair[1].step()


def test_a_step_that_a_rank_leaves_out_is_told():
    with pytest.raises(WorkerError, match="diverged"):
        run(drifting, 4)


def in_stages(rank: int, world_size: int) -> tuple[int, int]:
    """What this rank has executed of what all do together, after two steps."""
    plan = Plan(zero=3, pipeline="1f1b", microbatches=2)
    model: Any = make(blocks=4)
    parallelize(model, make_mesh(device_type="cpu", pp=2, dp=world_size // 2), plan)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        forward_backward(model, *batch(number))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    log = execution_log(range(world_size))
    assert log is not None
    return log.count, log.digest


def test_ranks_of_stages_do_not_drift_apart():
    # In processes, which compare what they write to: each stage has buffers of its own.
    assert len(set(run(in_stages, 4))) == 1
