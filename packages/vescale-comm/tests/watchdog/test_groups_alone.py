"""A rank that makes a group alone is named, and ends: torch would have it wait for half an hour."""

import os
import socket
import subprocess
import sys
import time

import torch.distributed as dist
from vescale_comm import bound_waits


def program(rank, port):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    bound_waits(timeout=4, report_after=1)
    if rank == 1:
        dist.new_group([0, 1])  # the line of rank 1
    time.sleep(14)


def test_it_ends_soon_after_the_timeout_and_names_the_call_and_who_is_missing():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(port)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = ranks[1].communicate(timeout=100)[1]
        assert ranks[0].poll() is None
    finally:
        for each in ranks:
            each.kill()
            each.wait()
            each.stderr.close()
    assert ranks[1].returncode == 1
    (error,) = [line for line in said.split("\n") if line.startswith("vescale_comm.CommTimeout")]
    assert "waiting in new_group over ranks 0, 1" in error
    assert f"at {__file__}:" in error
    assert "timed out after 4 s" in error
    assert "  rank 0: at " in said


if __name__ == "__main__":
    program(int(sys.argv[1]), sys.argv[2])
