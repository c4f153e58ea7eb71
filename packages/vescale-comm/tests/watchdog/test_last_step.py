"""What differs in the last step is told as the world ends, where no collective comes any more.

In processes of their own, as of a script: whichever way it ends, in a bounded time, and with an
exit code that says so.
"""

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vescale_comm import all_gather, all_reduce, execution_log
from vescale_comm._watchdog import comparison
from vescale_comm_processes import ended, free_port

HERE = __file__
SIZE = 3


def steps():
    for _ in range(3):
        all_reduce(torch.ones(4))
        all_gather(torch.ones(4))


def record(what):
    """An event at which no rank waits for another one, as a draw or a broadcast."""
    execution_log(range(SIZE)).record(what)


def same(rank):
    record("drew numbers")


def other_values(rank):
    record("drew 5" if rank == 1 else "drew 4")  # the line that differs
    dist.barrier()  # torch's own, which is no event: nobody is told of it before he was here


def other_number(rank):
    """As the learning rate of the last step: no event follows."""
    rate = 0.5 if rank == 1 else 0.1
    execution_log(range(SIZE)).note(hash(rate), f"rate {rate}")
    dist.barrier()


def one_more(rank):
    if rank != 1:
        record("drew numbers")
    dist.barrier()


def late_and_other(rank):
    other_values(rank)
    time.sleep(0.5 * rank)


def destroys(rank):
    other_values(rank)
    dist.destroy_process_group()


def destroys_and_goes_on(rank):
    """Another world: that it follows is no difference in the first."""
    same(rank)
    dist.destroy_process_group()
    join(rank, os.environ["NEXT"])
    steps()
    other_values(rank)
    dist.destroy_process_group()


def another_thread_lets_go(rank):
    """Of the world, last of all: the verdict is found in that thread, as the program ends."""
    late_and_other(rank)
    held, begun = [dist.group.WORLD], threading.Event()

    def let_go():
        begun.set()
        held.clear()

    dist.destroy_process_group()
    threading.Thread(target=let_go, daemon=True).start()
    begun.wait(10)


def raises(rank):
    if rank == 1:
        raise ValueError("boom")
    record("drew numbers")


def is_caught(rank):
    """Who hears of it by an exception does with it as he likes."""
    try:
        all_reduce(torch.ones(5 + rank))
    except RuntimeError:
        return


def works_alone(rank):
    """Rank 2 saves a file until the others have ended, and longer than the server of the store."""
    record("drew numbers")
    deadline = time.monotonic() + 50
    while rank == 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        if all(Path(f"{other}.txt").read_text().endswith("ended\n") for other in (0, 1)):
            print("the others ended before", flush=True)
            break


def join(rank, port):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)


def program(rank, case, ports, folder):
    # Long where the machine may be busy; short where it is how long the server stays.
    comparison.END_SECONDS = 0.5 if (case, rank) == (works_alone, 0) else 60.0
    os.environ["NEXT"] = str(ports[1])
    os.chdir(folder)
    join(rank, ports[0])
    steps()
    case(rank)


def world(case, folder):
    """The exit code of each rank and what it printed."""
    return ended(program, SIZE, folder, case, (free_port(), free_port()), str(folder))


@pytest.mark.parametrize(
    "case", [other_values, late_and_other, destroys, destroys_and_goes_on, another_thread_lets_go]
)
def test_the_rank_the_event_and_the_line_are_told_on_every_rank(case, tmp_path):
    for code, said in world(case, tmp_path):
        assert code == 1, said
        assert "CommMismatchError: the ranks have diverged (ranks 0-2" in said
        (one,) = {line for line in said.split("\n") if line.startswith("  rank 1: ")}
        (rest,) = {line for line in said.split("\n") if line.startswith("  ranks 0, 2: ")}
        assert "drew 5, at " in one
        assert "drew 4, at " in rest
        assert f"{HERE}:" in one


def test_an_event_that_one_rank_lacks_is_told(tmp_path):
    for code, said in world(one_more, tmp_path):
        assert code == 1, said
        assert "  rank 1: has ended without it" in said
        assert "  ranks 0, 2: drew numbers, at " in said


def test_a_number_after_the_last_event_is_told(tmp_path):
    for code, said in world(other_number, tmp_path):
        assert code == 1, said
        assert "  rank 1: the end of the program, made by rate 0.5" in said
        # Who hears of it before he has ended has not come there yet, as one of the others may.
        assert re.search(r"[02]: the end of the program, made by rate 0\.1", said), said


@pytest.mark.parametrize("case", [same, is_caught])
def test_nothing_is_added_to_programs_that_are_right_or_have_been_told(case, tmp_path):
    for code, said in world(case, tmp_path):
        assert code == 0, said
        assert case is is_caught or "drifted" not in said


def test_a_rank_that_raised_is_no_drift(tmp_path):
    for _, said in world(raises, tmp_path):
        assert "drifted" not in said


def test_a_rank_that_works_alone_at_the_end_is_not_waited_for(tmp_path):
    # Rank 1 knows that rank 2 is as far; rank 0 keeps the store for a while.
    for rank, (code, said) in enumerate(world(works_alone, tmp_path)):
        assert code == 0, said
        assert "drifted" not in said
        assert ("the others ended before" in said) == (rank == 2)
