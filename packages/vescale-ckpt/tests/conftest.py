"""Makes the helper modules beside the tests importable, and keeps torch to one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def path(tmp_path):
    """Where a test's checkpoint shall be: nothing is there yet."""
    return f"{tmp_path}/step-1"
