"""Ranks that read together move in step, and none waits for one that stopped, died or hangs."""

import random
import subprocess
import sys
import threading
import time

import pytest
from vescale_ckpt import CoordinationError
from vescale_ckpt._coordination import pipe_barrier
from vescale_ckpt._coordination.pipe_barrier import PipeBarrier, in_rounds

testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")


def in_background(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def met(everyone):
    """Whether each of them, all at the same time, found that all could attach."""
    found = {}
    threads = [
        in_background(lambda steps=steps: found.update({steps.rank: steps.meet()}))
        for steps in everyone
    ]
    for thread in threads:
        thread.join(20)
    return found


@pytest.fixture
def pair():
    both = [PipeBarrier(0), PipeBarrier(1)]
    names = {steps.rank: steps.name for steps in both}
    for steps in both:
        steps.attach(names)
    assert met(both) == {0: True, 1: True}
    yield both
    for steps in both:
        steps.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_nothing_is_taken_too_early_or_filled_too_soon(slots):
    ranks, rounds = 4, 40
    everyone = [PipeBarrier(rank) for rank in range(ranks)]
    names = {steps.rank: steps.name for steps in everyone}
    filled, taken, wrong, ended = [0] * ranks, [0] * ranks, [], []

    def walk(steps):
        rng = random.Random(steps.rank)
        assert steps.meet()

        def fill(n):
            if min(taken) <= n - slots or filled[steps.rank] != n:
                wrong.append(("fill", n))
            time.sleep(rng.choice([0, 0, 0.001, 0.003]))
            filled[steps.rank] += 1

        def take(n):
            if min(filled) <= n or taken[steps.rank] != n:
                wrong.append(("take", n))
            time.sleep(rng.choice([0, 0, 0.001, 0.003]))
            taken[steps.rank] += 1

        ended.append(in_rounds(steps, rounds, slots, fill, take))

    for steps in everyone:
        steps.attach(names)
    threads = [in_background(lambda steps=steps: walk(steps)) for steps in everyone]
    for thread in threads:
        thread.join(20)
    for steps in everyone:
        steps.close()
    assert wrong == []
    assert ended == [True] * ranks
    assert filled == taken == [rounds] * ranks


def test_all_meet_or_none():
    everyone = [PipeBarrier(rank) for rank in range(4)]
    names = {steps.rank: steps.name for steps in everyone}
    for steps in everyone:
        steps.attach(names)
    assert met(everyone) == dict.fromkeys(range(4), True)
    for steps in everyone:
        steps.close()

    everyone = [PipeBarrier(rank) for rank in range(4)]
    names = {steps.rank: steps.name for steps in everyone}
    for steps in everyone[1:3]:
        steps.attach(names)
    everyone[0].leave()
    # It has never opened the pipe while somebody read there.
    everyone[3].attach(names)
    assert met(everyone[1:]) == dict.fromkeys((1, 2, 3), False)
    for steps in everyone:
        steps.close()


def test_a_crowd_whose_words_come_at_once(pair):
    thread = in_background(lambda: [pair[1].tell(n, n) for n in range(500)])
    thread.join(20)
    while pair[0].filled.get(1) != 499:
        pair[0].listen([1])


def alone_in_rounds(steps, slots=2):
    """How many rounds a rank fills that nobody follows, and whether it came to the end."""
    done = []
    ended = in_rounds(steps, 9, slots, done.append, lambda n: pytest.fail("took too early"))
    return done, ended


def test_one_that_stops_is_not_waited_for(pair):
    pair[1].stop()
    done, ended = alone_in_rounds(pair[0])
    assert ended is False
    assert done == [0, 1]


def test_one_that_has_finished_is_not_taken_for_dead(pair):
    third = PipeBarrier(2)
    pair[0].attach({2: third.name})
    third.attach({0: pair[0].name})
    third.tell(1, 1)
    third.close()
    threading.Timer(0.2, lambda: pair[1].tell(1, 0)).start()
    taken = []
    assert in_rounds(pair[0], 1, 1, lambda n: None, taken.append)
    assert taken == [0]


def test_one_that_does_not_move(pair, monkeypatch):
    monkeypatch.setattr(pipe_barrier, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(CoordinationError, match=r"rank\(s\) \[1\] did not move for 0 s"):
        alone_in_rounds(pair[0])


_NEIGHBOUR = """
import sys, time
from vescale_ckpt._coordination.pipe_barrier import PipeBarrier
steps = PipeBarrier(1)
steps.attach({0: sys.argv[1]})
print(steps.name, flush=True)
steps.meet()
time.sleep(60)
"""


def test_a_process_that_is_killed():
    mine = PipeBarrier(0)
    command = [sys.executable, "-c", _NEIGHBOUR, mine.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        mine.attach({1: neighbour.stdout.readline().strip()})
        assert mine.meet()
        threading.Timer(0.2, neighbour.kill).start()
        with pytest.raises(CoordinationError, match=r"rank\(s\) \[1\] died"):
            alone_in_rounds(mine)
    mine.close()


def exchange_all_sizes(rank, world_size):
    from vescale_ckpt._coordination.groups import GroupCoordinator

    ranks = GroupCoordinator()
    # Around what goes with the lengths (64 KiB over all ranks), and on some ranks only.
    for sizes in ((0, 0, 0), (1, 0, 21845), (21845, 21846, 3), (0, 300_000, 21847)):
        texts = [bytes([65 + r]) * size for r, size in enumerate(sizes)]
        assert ranks.exchange(texts[rank]) == texts


def test_messages_of_any_length_arrive_whole():
    testing.run(exchange_all_sizes, 3)
