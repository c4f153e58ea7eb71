"""One thread per process: the machine's cores are shared by the ranks of a test."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from vescale_comm.testing import choose_core

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "support"))
torch.set_num_threads(1)
# The examples are the same in every run, and the time of each is the machine's affair.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    choose_core(items, HERE)


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    # `parallelize` looks through all objects for optimizers: what earlier files have left behind
    # holds none, and there are hundreds of thousands of them.
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
