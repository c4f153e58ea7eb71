"""A rank that makes a group alone is named, and ends: torch would have it wait for half an hour."""

import time
from pathlib import Path

import torch.distributed as dist
from vescale_comm import bound_waits
from vescale_comm._watchdog import watcher
from vescale_comm_processes import ended, free_port


def program(rank, port, folder):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    watcher._ANSWER_SECONDS = 60.0
    bound_waits(timeout=2, report_after=0.4)
    if rank == 1:
        dist.new_group([0, 1])  # the line of rank 1
    deadline = time.monotonic() + 100
    while (
        "CommTimeoutError" not in Path(folder, "1.txt").read_text() and time.monotonic() < deadline
    ):
        time.sleep(0.05)


def test_it_ends_soon_after_the_timeout_and_names_the_call_and_who_is_missing(tmp_path):
    _, (code, said) = ended(program, 2, tmp_path, free_port(), str(tmp_path))
    assert code == 1
    (error,) = [line for line in said.split("\n") if line.startswith("vescale_comm.CommTimeout")]
    assert "waiting in new_group over ranks 0, 1" in error
    assert f"at {__file__}:" in error
    assert "timed out after 2 s" in error
    assert "  rank 0: at " in said
