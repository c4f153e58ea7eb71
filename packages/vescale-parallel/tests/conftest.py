"""One thread per process: the machine's cores are shared by the ranks of a test."""

import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

# Helpers of several tests are imported by name; importlib mode puts no test folder on the path.
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "support"))
torch.set_num_threads(1)

# Long tables of like cases: a run takes one in so many, another part each day; `-m slow` the rest.
LONG = {
    "test_semantics": 4,
    "test_training": 3,
    "test_precision": 3,
    "test_failures": 2,
    "test_flat_steps": 4,
    "test_captured": 2,
    "test_pieces": 4,
    "test_weights": 3,
    "test_replaced": 3,
    "test_mesh": 2,
    "test_invariant": 5,
    "test_refused_stages": 3,
    "test_stages": 6,
    "test_stages_hf": 2,
}


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items):
    day = f"{datetime.now(UTC):%Y%m%d}"
    for item in items:
        share = LONG.get(item.path.stem, 1) if HERE in item.path.parents else 1
        if hasattr(item, "callspec") and zlib.crc32(f"{day} {item.name}".encode()) % share:
            item.add_marker(pytest.mark.slow)


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
