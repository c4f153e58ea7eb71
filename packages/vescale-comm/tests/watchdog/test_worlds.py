"""A rank that does not come is named on every other one, with where it is or how it ended.

In processes of their own, since some of them die; each ends by itself in a bounded time.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vescale_comm import CollectiveError, all_reduce, bound_waits

SIZE = 3
RAISED = "raised ValueError: boom, at "
KILLED = "ended without a word"


def raises():
    raise ValueError("boom")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    os.abort()  # as gloo does, from a thread of its own


def returns():
    sys.exit(0)


def sleeps():
    time.sleep(25)  # longer than the timeout


CASES = {each.__name__: each for each in (raises, is_killed, crashes, returns, sleeps)}


def program(case, who, rank, where):
    """Rank `who` does what the case says, while the others wait for it."""
    logging.basicConfig(format="logged: %(message)s")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)
    bound_waits(timeout=20, report_after=1)
    all_reduce(torch.ones(3))
    if rank == who:
        CASES[case]()
    try:
        all_reduce(torch.ones(3))
    except CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def forked(output, *args):
    """Run the program as the interpreter runs a script, in a process that has torch already."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        program(*args)
    except SystemExit:
        pass
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    # multiprocessing's own processes leave without what is registered for an exit.
    atexit._run_exitfuncs()
    os._exit(0)


def world(case, who, where, folder):
    """What each rank printed."""
    # Its server has no faulthandler, which pytest enables, and which would have crashes elsewhere.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vescale_comm.testing"])
    files = [folder / f"rank{rank}.txt" for rank in range(SIZE)]
    ranks = [
        context.Process(target=forked, args=(str(file), case, who, rank, where), daemon=True)
        for rank, file in enumerate(files)
    ]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(120)
        assert not any(each.is_alive() for each in ranks)
        return [each.read_text() for each in files]
    finally:
        for each in ranks:
            each.kill()


def tcp(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def file(folder):
    return f"file://{folder}/store"


def check_named(printed, who, words):
    """Every other rank raises, and says of `who` what became of it."""
    for rank in {*range(SIZE)} - {who}:
        lines = printed[rank].split("\n")
        (error,) = [each for each in lines if each.startswith("RankFailedError")]
        assert "all_reduce of torch.float32 (3,)" in error
        (named,) = [each for each in lines if each.startswith(f"  rank {who}: ")]
        assert words in named
        assert " at " not in words or f"{Path(__file__).name}:" in named


@pytest.mark.parametrize(
    ("case", "who", "where", "words"),
    [
        ("raises", 0, tcp, RAISED),  # and with it goes the store
        ("raises", 1, file, RAISED),
        ("is_killed", 0, tcp, KILLED),
        ("is_killed", 2, tcp, KILLED),
        ("crashes", 2, tcp, "crashed in C++: Aborted, at "),
        ("returns", 2, tcp, "reached the end of its program"),
    ],
    ids=["raises-0", "raises-1-file", "killed-0", "killed-2", "crashes-2", "returns-2"],
)
def test_a_rank_that_ends_is_named_on_the_others(tmp_path, case, who, where, words):
    check_named(world(case, who, where(tmp_path), tmp_path), who, words)


def test_a_script_that_raises_is_named_on_the_others(tmp_path):
    where = tcp(tmp_path)
    arguments = [
        [sys.executable, __file__, "raises", "2", str(rank), where] for rank in range(SIZE)
    ]
    ranks = [
        subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for each in arguments
    ]
    try:
        check_named([each.communicate(timeout=200)[0] for each in ranks], 2, RAISED)
    finally:
        for each in ranks:
            each.kill()


def test_a_rank_that_does_something_else_is_named_on_every_rank_and_the_wait_ends(tmp_path):
    printed = world("sleeps", 2, tcp(tmp_path), tmp_path)
    for rank, text in enumerate(printed):
        said = text[text.index("logged: a collective does not complete") :]
        assert f"(rank {rank} of 3 says)" in said
        assert "rank 2: at " in said
        assert "in sleeps" in said
        waiting = "ranks 0, 1: waiting in all_reduce of torch.float32 (3,) over ranks 0-2"
        assert waiting in said
        assert "in program; missing: rank 2" in said
    for rank in (0, 1):
        assert "CommTimeoutError: all_reduce of torch.float32 (3,)" in printed[rank]


if __name__ == "__main__":
    program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
