"""The installed package works by itself: two ranks reduce, and importing it does nothing."""

import subprocess
import sys

import pytest
import torch
from vescale_comm import all_gather, all_reduce
from vescale_comm.testing import run


def reduce_and_gather(rank, world_size):
    return all_reduce(torch.tensor([rank + 1.0])), all_gather(torch.full((rank,), 7), sizes=[0, 1])


@pytest.mark.smoke
def test_two_ranks():
    for total, gathered in run(reduce_and_gather, 2):
        assert total.tolist() == [3.0]
        assert gathered.tolist() == [7]


CODE = """
import os, sys, threading
import torch, torch.distributed
before, threads = dict(os.environ), threading.active_count()
import vescale_comm, vescale_comm.testing
assert dict(os.environ) == before
assert threading.active_count() == threads
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert "triton" not in sys.modules
siblings = ["vescale_rng", "vescale_dtensor", "vescale_parallel", "vescale_ckpt"]
assert not set(siblings) & set(sys.modules)
"""


@pytest.mark.smoke
def test_importing_has_no_side_effects():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
