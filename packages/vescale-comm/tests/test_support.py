"""SUPPORT.md is what a run of its cases gives, and no case is wrong; on NCCL where there is one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vescale_comm_support as support


def test_the_table_is_what_a_run_gives():
    text = support.table()
    assert text == support.FILE.read_text()
    assert " x |" not in text


def under_torchrun(option):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(Path(support.__file__))
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={support.MEMBERS}", script, option],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout.count("0 rows are wrong") == support.MEMBERS, done.stdout + done.stderr


@pytest.mark.gpu
def test_nccl():
    if torch.cuda.device_count() < support.MEMBERS:
        pytest.skip(f"needs {support.MEMBERS} GPUs, and there are {torch.cuda.device_count()}")
    under_torchrun("--nccl")


@pytest.mark.slow  # the table above holds what it would find
def test_the_script_that_runs_nccl_runs():
    under_torchrun("--gloo")
