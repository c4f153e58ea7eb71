"""Shared by all tests: one thread, so that the ranks of a test do not fight over the machine."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from vescale_comm.testing import choose_core, preload

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
HERE = Path(__file__).parent
HELPERS = ("support", "redistribute", "ops", "ops/cases", "capture", "programs")
sys.path[:0] = [*(str(HERE / folder) for folder in HELPERS), str(HERE.parent / "benchmarks")]
torch.set_num_threads(1)
# The examples are the same in every run, and the time of each is the machine's affair.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")
# Once for all workers, not once in each.
preload("vescale_dtensor")


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    choose_core(items, HERE)


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    # A write to a tensor of which there is a copied view collects garbage, as some tests do at
    # random: of what earlier files have left behind there is none, and it is hundreds of thousands
    # of objects to look through.
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
