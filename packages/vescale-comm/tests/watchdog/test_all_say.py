"""Whether all ranks say a word: one answer for every rank that asks, and nobody waits for long."""

import time

from vescale_comm import execution_log
from vescale_comm.testing import run


def answers(rank, world_size):
    log = execution_log(range(world_size))
    found = [log.all_say("every rank"), log.all_say("every rank, again")]
    began = time.monotonic()
    # One rank never asks, and another one asks when the answer is known.
    if rank == 1:
        time.sleep(2.0)
    if rank != 0:
        found.append(log.all_say("not rank 0"))
    waited = time.monotonic() - began
    found.append(log.all_say(f"rank {rank} speaks of something else"))
    return found, waited


def test_one_answer_for_all_that_ask():
    for rank, (found, waited) in enumerate(run(answers, 3, timeout=60)):
        assert found == [True, True, False, False][: 3 if rank == 0 else 4]
        assert waited < 10


def alone(rank, world_size):
    return execution_log(range(world_size)) is None


def test_a_world_of_one_has_nobody_to_ask():
    assert run(alone, 1, timeout=60) == [True]
