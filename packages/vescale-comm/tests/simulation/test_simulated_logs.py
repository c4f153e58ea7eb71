"""A simulation compares what its ranks execute besides collectives, as processes do."""

import torch
import torch.distributed as dist
from vescale_comm import CommMismatchError, bound_waits, execution_log, simulate
from vescale_comm._watchdog.current_watcher import forget_executed
from vescale_comm.testing import Failed


def drifted(outcomes):
    for one in outcomes:
        assert isinstance(one, Failed), one
        assert one.type_name == "CommMismatchError"
        assert "the ranks have diverged (ranks 0-2 execute one program together)" in one.message
    return outcomes[0].message


def differing(rank, world_size):
    log = execution_log(range(world_size))
    log.record("begins")
    dist.barrier()
    log.note(7, "steps at 0.1")
    log.record("another" if rank == 1 else "one")
    dist.barrier()
    raise AssertionError("nobody comes here")


def test_an_event_that_differs_is_named_on_every_rank():
    message = drifted(simulate(3).outcomes(differing))
    assert f"rank 1: another, at {__file__}:" in message
    assert "they differ from event 2 on" in message


def noting(rank, world_size):
    log = execution_log(range(world_size))
    log.note(hash(rank == 2), ("step", rank == 2))
    log.record("steps")


def test_a_number_that_differs_is_named_with_what_it_belongs_to():
    assert "made by ('step', True)" in drifted(simulate(3).outcomes(noting))


def lacking(rank, world_size):
    log = execution_log(range(world_size))
    log.record("begins")
    if rank == 1:
        log.record("goes on")


def test_an_event_that_others_never_come_to_is_named_at_the_end():
    message = drifted(simulate(3).outcomes(lacking))
    assert "rank 1: goes on" in message
    assert "ranks 0, 2: has ended without it" in message


def uncompared(rank, world_size):
    bound_waits(compare=False)
    execution_log(range(world_size)).record(f"of rank {rank}")
    return rank


def test_what_is_not_to_be_compared_is_not():
    assert simulate(3).run(uncompared) == [0, 1, 2]


def alike(rank, world_size):
    log, rows = execution_log(range(world_size)), execution_log([rank // 2 * 2, rank // 2 * 2 + 1])
    for _ in range(3 + rank // 2):  # ranks of another log execute another program
        rows.record("row")
    try:
        log.record("first")
        dist.all_reduce(torch.ones(2 if rank else 3))
    except CommMismatchError:
        pass  # said by the collective, and not once more at the end
    forget_executed()
    log.record("begins anew")
    return log.count, execution_log([rank])


def test_ranks_that_execute_the_same_hear_nothing():
    assert simulate(4).run(alike) == [(1, None)] * 4
