"""Makes the helper module beside the tests importable, here and in the workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from vescale_comm.testing import preload

preload("torch.distributed.fsdp", "torch.distributed.tensor")
