"""Shared by all tests: one thread, so that the ranks of a test do not fight over the machine."""

import sys
from pathlib import Path

import torch
from vescale_comm.testing import preload

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
torch.set_num_threads(1)
# Once for all workers, not once in each.
preload("vescale_dtensor")
