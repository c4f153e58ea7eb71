"""What differs in the last step is told as the world ends, where no collective comes any more.

In processes of their own, as of a script: whichever way it ends, in a bounded time, and with an
exit code that says so.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from vescale_comm import all_gather, all_reduce, execution_log
from vescale_comm._watchdog import comparison

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
    join(rank, "NEXT")
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
    """Rank 2 saves a file for longer than the others wait."""
    record("drew numbers")
    if rank == 2:
        time.sleep(4)


CASES = {
    each.__name__: each
    for each in (
        same,
        other_values,
        other_number,
        one_more,
        late_and_other,
        destroys,
        destroys_and_goes_on,
        another_thread_lets_go,
        raises,
        is_caught,
        works_alone,
    )
}


def join(rank, world="FIRST"):
    where = f"tcp://127.0.0.1:{os.environ[world]}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)


def program(case, rank, ports, folder):
    file = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Long where the machine may be busy; short where it is what is measured.
    comparison.END_SECONDS = 2.0 if case == "works_alone" else 20.0
    os.environ.update(GLOO_SOCKET_IFNAME="lo", FIRST=ports[0], NEXT=ports[1])
    join(rank)
    steps()
    try:
        CASES[case](rank)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    # As the interpreter ends; multiprocessing's own processes do it some other way.
    began = time.monotonic()
    atexit._run_exitfuncs()
    print(f"ended after {time.monotonic() - began:.1f}", flush=True)
    os._exit(0)


def world(case, folder):
    """The exit code of each rank, what it printed, and the seconds that its end took."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing"])
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    ranks = [
        context.Process(target=program, args=(case, rank, ports, str(folder)), daemon=True)
        for rank in range(SIZE)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(60)
        assert not any(each.is_alive() for each in ranks)
    finally:
        for each in ranks:
            each.kill()
    return [(ranks[r].exitcode, (folder / f"{r}.txt").read_text()) for r in range(SIZE)]


@pytest.mark.parametrize(
    "case",
    [
        "other_values",
        "late_and_other",
        "destroys",
        "destroys_and_goes_on",
        "another_thread_lets_go",
    ],
)
def test_the_rank_the_event_and_the_line_are_told_on_every_rank(case, tmp_path):
    for code, said in world(case, tmp_path):
        assert code == 1, said
        assert "CommMismatchError: the ranks have drifted apart (ranks 0-2" in said
        (one,) = {line for line in said.split("\n") if line.startswith("  rank 1: ")}
        (rest,) = {line for line in said.split("\n") if line.startswith("  ranks 0, 2: ")}
        assert "drew 5, at " in one
        assert "drew 4, at " in rest
        assert f"{HERE}:" in one


def test_an_event_that_one_rank_lacks_is_told(tmp_path):
    for code, said in world("one_more", tmp_path):
        assert code == 1, said
        assert "  rank 1: has ended without it" in said
        assert "  ranks 0, 2: drew numbers, at " in said


def test_a_number_after_the_last_event_is_told(tmp_path):
    for code, said in world("other_number", tmp_path):
        assert code == 1, said
        assert "  rank 1: the end of the program, made by rate 0.5" in said
        # Who hears of it before he has ended has not come there yet, as rank 0 may.
        assert "2: the end of the program, made by rate 0.1" in said


@pytest.mark.parametrize("case", ["same", "is_caught"])
def test_nothing_is_added_to_programs_that_are_right_or_have_been_told(case, tmp_path):
    for code, said in world(case, tmp_path):
        assert code == 0, said
        assert case == "is_caught" or "drifted" not in said


def test_a_rank_that_raised_is_no_drift(tmp_path):
    for _, said in world("raises", tmp_path):
        assert "drifted" not in said


def test_a_rank_that_works_alone_at_the_end_is_not_waited_for(tmp_path):
    for rank, (code, said) in enumerate(world("works_alone", tmp_path)):
        assert code == 0, said
        assert "drifted" not in said
        # Rank 1 knows that rank 2 is as far; rank 0 keeps the store for a while.
        if rank != 2:
            assert float(said.rpartition("ended after ")[2]) < (2 if rank == 1 else 6)
