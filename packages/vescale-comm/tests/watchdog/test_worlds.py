"""A rank that does not come is named on every other one, with where it is or how it ended.

In processes of their own, since some of them die; each ends by itself in a bounded time.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vescale_comm import CollectiveError, all_reduce, bound_waits
from vescale_comm._watchdog import watcher
from vescale_comm_processes import ended, free_port

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
    """Until the others have given up."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if all("CommTimeoutError" in Path(f"{rank}.txt").read_text() for rank in (0, 1)):
            return


CASES = {each.__name__: each for each in (raises, is_killed, crashes, returns, sleeps)}


def program(rank, case, who, where, folder):
    """Rank `who` does what the case says, while the others wait for it."""
    logging.basicConfig(format="logged: %(message)s")
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE)
    watcher._ANSWER_SECONDS = 60.0
    bound_waits(timeout=60)
    for _ in range(2):  # from here on it is nothing new, for which others are waited for
        all_reduce(torch.ones(3))
    # Reports come long before the end of the wait.
    bound_waits(timeout=5 if case == "sleeps" else 60, report_after=0.4)
    if rank == who:
        CASES[case]()
    try:
        all_reduce(torch.ones(3))
    except CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def world(case, who, where, folder):
    """What each rank printed."""
    return [said for _, said in ended(program, SIZE, folder, case, who, where, str(folder))]


def tcp(folder):
    return f"tcp://127.0.0.1:{free_port()}"


def file(folder):
    return f"file://{folder}/store"


def check_named(printed, who, words):
    """Every other rank raises, and says of `who` what became of it."""
    for rank in {*range(SIZE)} - {who}:
        lines = printed[rank].split("\n")
        (error,) = [each for each in lines if each.startswith("RankFailedError")]
        assert "all_reduce of torch.float32 (3,)" in error
        # On a busy machine what is logged of a long wait may come before.
        told = lines[lines.index(error) :]
        named = next(each for each in told if each.startswith(f"  rank {who}: "))
        assert words in named
        assert " at " not in words or f"{Path(__file__).name}:" in named


ENDS = [
    ("raises", 0, tcp, RAISED),  # and with it goes the store
    ("raises", 1, file, RAISED),
    ("is_killed", 0, tcp, KILLED),
    ("is_killed", 2, tcp, KILLED),
    ("crashes", 2, tcp, "crashed in C++: Aborted, at "),
    ("returns", 2, tcp, "reached the end of its program"),
]


@pytest.mark.parametrize(
    ("case", "who", "where", "words"),
    ENDS,
    ids=["raises-0", "raises-1-file", "killed-0", "killed-2", "crashes-2", "returns-2"],
)
def test_a_rank_that_ends_is_named_on_the_others(tmp_path, case, who, where, words):
    check_named(world(case, who, where(tmp_path), tmp_path), who, words)


def test_a_script_that_raises_is_named_on_the_others(tmp_path):
    where = tcp(tmp_path)
    arguments = [
        [sys.executable, __file__, str(rank), where, str(tmp_path)] for rank in range(SIZE)
    ]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    how["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen(each, **how) for each in arguments]
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
    program(int(sys.argv[1]), "raises", 2, *sys.argv[2:])
