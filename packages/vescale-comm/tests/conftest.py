"""Makes the helper module beside the tests importable, here and in the workers; one thread each."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from hypothesis import settings
from vescale_comm.testing import preload

# Workers have one as well, and sums of another number of threads have other bits.
torch.set_num_threads(1)
preload("torch.distributed.fsdp", "torch.distributed.tensor")

# The examples are the same in every run, and the time of each is the machine's affair.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")


def pytest_configure(config):
    # Processes that a test starts import its module by the name that pytest gave it, which counts
    # from there; `python -m pytest` has that folder on the path only where it is run from it.
    sys.path.append(str(config.rootpath))
