"""One thread per process: the machine's cores are shared by the ranks of a test."""

import sys
from pathlib import Path

import torch

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)
