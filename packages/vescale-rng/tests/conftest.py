"""Shared by all tests: one thread, so that timing-free tests do not fight over the machine."""

import sys
from pathlib import Path

import pytest
import torch

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
