"""Shared by all tests: one thread, so that timing-free tests do not fight over the machine."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

# The examples are the same in every run, and the time of each is the machine's affair.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
