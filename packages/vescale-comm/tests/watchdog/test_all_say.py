"""Whether all ranks say a word: one answer for every rank that asks, and nobody waits for long."""

import pytest
import torch.distributed as dist
from vescale_comm import execution_log
from vescale_comm.testing import run


def answers(rank, world_size):
    log = execution_log(range(world_size))
    with pytest.MonkeyPatch.context() as patch:
        # As long as it takes where all come.
        patch.setattr("vescale_comm._watchdog.execution_log._SAY_SECONDS", 60.0)
        found = [log.all_say("every rank"), log.all_say("every rank, again")]
    # Rank 0 never asks, and rank 1 does when the answer is known.
    if rank == 2:
        found.append(log.all_say("not rank 0"))
    dist.barrier()
    if rank == 1:
        found.append(log.all_say("not rank 0"))
    return [*found, log.all_say(f"rank {rank} speaks of something else")]


def test_one_answer_for_all_that_ask():
    for rank, found in enumerate(run(answers, 3)):
        assert found == [True, True, False, False][: 3 if rank == 0 else 4]


def alone(rank, world_size):
    return execution_log(range(world_size)) is None


def test_a_world_of_one_has_nobody_to_ask():
    assert run(alone, 1) == [True]
