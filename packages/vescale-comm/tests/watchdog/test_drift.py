"""Ranks that diverge are told what differs, who and where; those that do not hear nothing.

Collectives are compared as they are recorded: what is new where everybody waits for the others, the
rest by a thread beside the program. Nothing is added to what is sent.
"""

import time

import pytest
import torch
import torch.distributed as dist
import vescale_comm
from vescale_comm import all_gather, all_reduce, bound_waits, broadcast, reduce_scatter, testing
from vescale_comm._watchdog import comparison as comparison_module
from vescale_comm._watchdog.comparison import Comparison
from vescale_comm._watchdog.current_watcher import current
from vescale_comm._watchdog.execution_log import ExecutionLog
from vescale_comm_processes import ended, free_port

HERE = __file__


def comparison():
    return current().comparison


def settled(rank):
    """Every rank has compared what it executed so far, and nothing differs."""
    dist.barrier()
    return comparison().look()


# What differs.


def another_size(rank, world_size):
    for _ in range(3):
        all_reduce(torch.ones(4))
    all_reduce(torch.ones(5 if rank == 1 else 6))  # new to everybody


def another_call(rank, world_size):
    all_reduce(torch.ones(4))
    if rank == 1:
        all_gather(torch.ones(4))  # line of rank 1
    else:
        reduce_scatter(torch.ones(4 * world_size))


def another_gradient(rank, world_size):
    """Rank 1 alone has a node, and would come alone to the collective of the backward."""
    x = torch.ones(4)
    all_reduce(x)
    # The same call for a check of shapes: the other ranks even take the fast path.
    all_reduce(x.requires_grad_() if rank == 1 else x).sum()


@pytest.mark.parametrize("case", [another_size, another_call, another_gradient])
def test_what_is_new_is_compared_before_it_is_sent(case):
    for outcome in testing.outcomes(case, 3, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "the ranks have diverged (ranks 0-2" in outcome.message
        (one,) = [line for line in outcome.message.split("\n") if line.startswith("  rank 1: ")]
        (rest,) = [
            line for line in outcome.message.split("\n") if line.startswith("  ranks 0, 2: ")
        ]
        if case is another_size:
            assert "from event 4 on" in outcome.message
            assert f"all_reduce torch.float32 5, at {HERE}:" in one
            assert "all_reduce torch.float32 6" in rest
        elif case is another_gradient:
            assert "all_reduce torch.float32 4 of an input that requires a gradient" in one
            assert "requires a gradient" not in rest
        else:
            assert "all_gather torch.float32 12" in one
            assert "reduce_scatter torch.float32 12" in rest
            assert "in another_call" in one


def known_before(rank, world_size):
    """What differs was met before on every rank: found beside the program, within seconds."""
    for root in (0, 1, 0, 1):
        broadcast(torch.ones(4), source=root)
    # A broadcast waits for nobody: with another root each rank goes on, with numbers of its own.
    log = vescale_comm.as_group()._log
    log.record(("all_reduce", torch.float32, 4 + rank))
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        time.sleep(0.1)
        log.record("one more")


def test_what_is_not_new_is_found_within_seconds():
    for outcome in testing.outcomes(known_before, 2, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "they differ from event 5 on" in outcome.message
        assert f"rank 1: all_reduce torch.float32 5, at {HERE}:" in outcome.message


def program(rank, case, port):
    """One rank of a world of its own: it ends by raising, as a script does."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=3)
    bound_waits(timeout=60, report_after=30)
    for _ in range(3):
        all_reduce(torch.ones(4))
        all_gather(torch.ones(4))
    case(rank)


def skips_one(rank):
    if rank != 2:
        all_reduce(torch.ones(4))
    for _ in range(5):
        all_gather(torch.ones(4))
        all_reduce(torch.ones(4))


def grows_alone(rank):
    for _ in range(5):
        all_reduce(torch.ones(9 if rank == 2 else 4))
        all_gather(torch.ones(4))


def comes_late(rank):
    """Rank 2 is busy for a while, and then calls what it knows: gloo would mix the two up."""
    comparison_module._LEAST_MEET_SECONDS = 0.1
    bound_waits(timeout=300)  # of which a part is more than that while
    if rank != 2:
        all_reduce(torch.ones(9))
    time.sleep(1)
    all_gather(torch.ones(4))


@pytest.mark.parametrize("case", [skips_one, grows_alone, comes_late])
def test_a_rank_that_waits_for_another_one_hears_why(tmp_path, case):
    for _, said in ended(program, 3, tmp_path, case, free_port()):
        raised = said.partition("Traceback (most recent call last)")[2]
        assert "CommMismatchError: " in raised
        assert "the ranks have diverged" in raised
        assert f"{HERE}:" in raised
        assert "rank 2: " in raised


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch):
    """The collective itself fails at once then, and says why."""
    monkeypatch.setattr("vescale_comm._watchdog.comparison._MOST_MEET_SECONDS", float("inf"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    asked = []

    def has_ended(rank):
        asked.append(rank)
        return True

    comparison = Comparison(store, 0, 2, lambda: True, has_ended)
    log = ExecutionLog((0, 1), "", comparison)
    log.record("something new", together=True)
    assert asked == [1]
    assert comparison.trouble is None


class Alone:
    """A comparison with nobody."""

    trouble, enabled = None, True

    def meet(self, log, count, value):
        pass


def test_what_is_equal_is_no_difference_whatever_else_a_rank_has_met():
    """1, 1.0 and True are one key of a dict, and three texts."""
    digests = []
    for first in ((), (1, 1.0), (True,)):
        others, log = (ExecutionLog(ranks, "", Alone()) for ranks in ((1, 2), (0, 1)))
        for value in first:
            others.record(("mul", value))
        for value in (1.0, True, 2):
            log.record(("mul", value))
        digests.append(log.digest)
    assert len(set(digests)) == 1


def off(rank, world_size):
    all_reduce(torch.ones(4))
    bound_waits(compare=False)
    try:
        log = vescale_comm.execution_log(range(world_size))
        before = comparison().operations, log.count
        log.record(("something", rank), together=True)
        for _ in range(50):
            all_reduce(torch.ones(4))
        assert (comparison().operations, log.count) == before
    finally:
        bound_waits(compare=True, timeout=1800)
    all_reduce(torch.ones(4))
    return settled(rank)


def test_it_can_be_turned_off():
    assert testing.run(off, 2, timeout=60) == [None, None]


def steady(rank, world_size):
    for _ in range(3):
        all_reduce(torch.ones(4))
        all_gather(torch.ones(4))
    dist.barrier()
    log = vescale_comm.as_group()._log
    told = []
    log._comparison.meet = lambda *args: told.append(args)
    try:
        for _ in range(200):
            all_reduce(torch.ones(4))
            all_gather(torch.ones(4))
    finally:
        del log._comparison.meet
    return len(told), settled(rank)


def test_what_a_steady_program_does_is_not_compared_at_once():
    assert testing.run(steady, 3, timeout=60) == [(0, None)] * 3


def test_there_is_no_log_of_one_rank_or_in_a_simulation():
    found = vescale_comm.simulate(2).run(lambda rank, size: vescale_comm.as_group()._log)
    assert found == [None] * 2


def crossed(rank, world_size):
    """Rank 0 goes to its pair for something new, and the others go on with everybody."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = vescale_comm.group_of(mesh, "tp")
    for _ in range(3):
        all_reduce(torch.ones(4))
        all_reduce(torch.ones(4), group=pair)
    if rank == 0:
        all_reduce(torch.ones(5), group=pair)  # line of rank 0
    all_reduce(torch.ones(6))


def test_ranks_that_wait_for_each_other_in_different_groups_are_told():
    for outcome in testing.outcomes(crossed, 4, timeout=60):
        assert outcome.type_name == "CommMismatchError"
        assert "they wait for each other at different calls" in outcome.message
        assert "rank 0: all_reduce torch.float32 5, at " in outcome.message
        assert "(together with ranks 0, 1)" in outcome.message
        assert "all_reduce torch.float32 6" in outcome.message
