"""Importing the package changes nothing in the process, and brings in no more of torch than torch's
own distributed tensors do.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys

before = dict(os.environ)
import torch
import torch.distributed.tensor

seed, modules, state = torch.manual_seed, set(sys.modules), torch.get_rng_state()
dispatcher = torch.distributed.tensor.DTensor.__torch_dispatch__
import {module}

assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
assert torch.manual_seed is seed
assert torch.equal(torch.get_rng_state(), state)
assert torch.distributed.tensor.DTensor.__torch_dispatch__ == dispatcher
assert not torch.distributed.is_initialized()
assert "torch._dynamo" not in sys.modules
brought = set(sys.modules) - modules
print(*sorted(m for m in brought if m.partition(".")[0] in ("torch", "numpy", "triton")))
"""
MODULES = [
    "vescale_dtensor",
    "vescale_dtensor.parallel, vescale_dtensor.experimental, vescale_dtensor.debug, "
    "vescale_dtensor.placement_types, vescale_dtensor.rules, vescale_dtensor.state_dict",
]


@pytest.mark.parametrize("module", MODULES)
def test_an_import_has_no_side_effect(module):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # What torch.distributed.tensor lacks of torch: single modules, and none of its compilers.
    brought = done.stdout.split()
    assert len(brought) < 12, brought
