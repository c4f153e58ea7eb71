"""Ranks that read together move in step, and none waits for one that stopped, died or hangs."""

import subprocess
import sys
import threading

import pytest
from vescale_ckpt import CoordinationError, _steps
from vescale_ckpt._steps import Steps

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


@pytest.fixture
def pair():
    both = [Steps(0), Steps(1)]
    names = {steps.rank: steps.name for steps in both}
    for steps in both:
        steps.attach(names)
    yield both
    for steps in both:
        steps.close()


def in_background(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_nobody_is_more_than_a_step_ahead():
    ranks, steps_each = 4, 50
    everyone = [Steps(rank) for rank in range(ranks)]
    names = {steps.rank: steps.name for steps in everyone}
    at = [0] * ranks
    seen = []

    def walk(steps):
        for step in range(1, steps_each + 1):
            at[steps.rank] = step
            assert steps.done(step)
            seen.append(min(at) >= step)

    for steps in everyone:
        steps.attach(names)
    threads = [in_background(lambda steps=steps: walk(steps)) for steps in everyone]
    for thread in threads:
        thread.join(20)
    for steps in everyone:
        steps.close()
    assert seen == [True] * (ranks * steps_each)


def test_one_that_stops_is_not_waited_for(pair):
    pair[1].stop()
    assert pair[0].done(1) is False


def test_one_that_has_finished_is_not_taken_for_dead(pair):
    thread = in_background(lambda: pair[1].done(1))
    assert pair[0].done(1)
    thread.join(20)
    third = Steps(2)
    third.close()  # frees numbers of descriptors, which must not be mixed up
    assert pair[0]._done == {1: 1}


def test_one_that_does_not_move(pair, monkeypatch):
    monkeypatch.setattr(_steps, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(CoordinationError, match=r"rank\(s\) \[1\] did not move for 0 s"):
        pair[0].done(1)


_NEIGHBOUR = """
import sys, time
from vescale_ckpt._steps import Steps
steps = Steps(1)
steps.attach({0: sys.argv[1]})
print(steps.name, flush=True)
time.sleep(60)
"""


def test_a_process_that_is_killed():
    mine = Steps(0)
    command = [sys.executable, "-c", _NEIGHBOUR, mine.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        mine.attach({1: neighbour.stdout.readline().strip()})
        threading.Timer(0.2, neighbour.kill).start()
        with pytest.raises(CoordinationError, match=r"rank\(s\) \[1\] died"):
            mine.done(1)
    mine.close()


def exchange_all_sizes(rank, world_size):
    from vescale_ckpt._coordinator import Distributed

    ranks = Distributed()
    # Around what goes with the lengths (64 KiB over all ranks), and on some ranks only.
    for sizes in ((0, 0, 0), (1, 0, 21845), (21845, 21846, 3), (0, 300_000, 21847)):
        texts = [bytes([65 + r]) * size for r, size in enumerate(sizes)]
        assert ranks.exchange(texts[rank]) == texts


def test_messages_of_any_length_arrive_whole():
    testing.run(exchange_all_sizes, 3)
