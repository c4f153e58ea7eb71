"""Where one rank alone refuses a captured call, every rank raises, within seconds and with words.

Ranks that refuse together raise what they refuse, and can go on; whatever one rank captures beside.
Ranks of a simulation, which are threads, may share a captured function. Of a call that not all
ranks make, others are asked nothing.
"""

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import vescale_dtensor as vd
from capture_guards import rows, spread
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import CommError, ExecutionLog, bound_waits, simulate
from vescale_comm.testing import on_ranks, outcomes, run
from vescale_dtensor import Replicate, Shard, capture, distribute_tensor

# Below what a collective waits for ranks that never come.
SECONDS = 15


def raised(act):
    began = time.monotonic()
    try:
        act()
    except (vd.CaptureError, CommError) as error:
        return type(error), str(error), time.monotonic() - began
    return None


def reads_first(rank, world_size):
    """The first call, which all ranks record."""

    def step(x, weight):
        loss = (x * weight).sum()
        if rank == 0:
            loss.to_local().item()
        return loss.full_tensor()

    captured, weight = vd.capture(step), spread(torch.ones(4), Replicate())
    return raised(lambda: captured(spread(rows()), weight))


def reads_at_the_end(rank, world_size):
    """What is found when the function has run, on the way to what ranks do next."""
    log = []

    def step(x):
        if rank == 0:
            log.append(1)
        return x.sum()

    captured = vd.capture(step)

    def act():
        for _ in range(3):
            captured(spread(rows())).full_tensor()

    return raised(act)


def changes_later(rank, world_size):
    """A call that one rank records again, and others replay."""

    class Options:
        reads = False

    def step(x):
        loss = x.sum()
        if Options.reads:
            loss.to_local().item()
        return loss.full_tensor()

    captured = vd.capture(step)
    for _ in range(3):
        captured(spread(rows()))
    Options.reads = rank == 0
    return raised(lambda: captured(spread(rows())))


def iterates(rank, world_size):
    """An argument that is refused before anything runs."""
    captured = vd.capture(lambda x, more: x.sum().full_tensor())
    return raised(lambda: captured(spread(rows()), iter([1]) if rank == 0 else None))


def has_hooks(rank, world_size):
    """What cannot run twice, where calls are compared."""
    weight = spread(torch.ones(4)).requires_grad_()
    if rank == 0:
        weight.register_hook(lambda gradient: None)
    captured = vd.capture(lambda x: (x.sum(0) * weight).sum().backward(), check=True)

    def act():
        for seed in range(5):
            captured(spread(rows(seed=seed)))

    return raised(act)


def bounded(rank, world_size, case):
    # No error reaches a rank that is in a collective which it has met before, until that ends.
    bound_waits(timeout=3)
    kind, words, waited = case(rank, world_size)
    # The test's world is of no use any more: raised, so that the next case has another one.
    raise AssertionError(f"{kind.__name__} after {waited:.0f} s: {words}")


@pytest.mark.parametrize("case", [reads_first, reads_at_the_end, changes_later, iterates])
def test_who_goes_on_is_told(case):
    one, two = outcomes(bounded, 2, case, timeout=60)
    assert "CaptureError after" in one.traceback
    assert "Other ranks do not refuse this call" in one.traceback
    assert "CommMismatchError after" in two.traceback
    assert "rank 0: cannot capture" in two.traceback


def test_what_cannot_run_twice_on_one_rank_is_refused_on_all():
    (kind, words, waited), (other, told, long) = run(has_hooks, 2, timeout=60)
    assert kind is other is vd.CaptureError
    assert "gradients of parameters have hooks" in words
    assert "on rank" in told
    assert max(waited, long) < SECONDS


def together(rank, world_size):
    """Ranks that all refuse, at other times and with other words, go on."""

    def make():
        return vd.capture(lambda x: float(x.sum()) if rank else x.sum().item())

    if rank == 0:
        make()  # one that others do not capture
    captured, x = make(), spread(rows())
    time.sleep(0.5 * rank)
    for _ in range(3):
        kind, words, _ = raised(lambda: captured(x))
        assert kind is vd.CaptureError
        assert "Other ranks" not in words
    return (x * 2).sum().full_tensor().item()


def test_ranks_that_refuse_together_go_on():
    one, two = run(together, 2, timeout=60)
    assert one == two


@vd.capture
def shared(x):
    return (x * 2).sum().full_tensor()


checked = vd.capture(lambda x: (x * 3).sum().full_tensor(), check=True)


def sharing(rank, world_size):
    for seed in range(5):
        x = spread(rows(seed=seed))
        assert shared(x) == (x * 2).sum().full_tensor()
        assert checked(x) == (x * 3).sum().full_tensor()
    assert len(shared.programs) == len(checked.programs) == 1
    assert shared.replays == checked.replays == 4


@pytest.mark.parametrize("time", range(2))
def test_threads_of_a_simulation_share_a_captured_function(time):
    simulate(2)(sharing)


def scaled(x: Tensor) -> Tensor:
    return x * x.sum().item()


def asked_by(mesh: DeviceMesh) -> list[tuple[tuple[int, ...], bool]]:
    """Whom a refused function asks whether they refuse it as well, and the answers."""
    answers: list[Any] = []
    asks = ExecutionLog.all_say

    def asked(log: ExecutionLog, word: str) -> bool:
        answers.append((log.ranks, asks(log, word)))
        return answers[-1][1]

    captured = capture(scaled, refused="run", mesh=mesh)
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    with patch.object(ExecutionLog, "all_say", asked):
        for _ in range(3):
            assert torch.equal(captured(x).full_tensor(), torch.arange(4.0) * 6)
    assert captured.refusal is not None
    return answers


@on_ranks(3)
def test_ranks_of_other_meshes_are_not_asked(rank: int, world_size: int):
    pair, alone = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
    if rank < 2:
        assert asked_by(pair) == [((0, 1), True)]
    else:
        assert asked_by(alone) == []
