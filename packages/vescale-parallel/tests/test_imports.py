"""Importing any module has no side effects and needs nothing that the `train` extra brings."""

import pkgutil
import subprocess
import sys

import pytest
import vescale_parallel

SCRIPT = """
import sys
for absent in ("vescale_ckpt", "rich", "tensorboard"):
    sys.modules[absent] = None
import importlib
import torch.distributed
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not torch.distributed.is_initialized()
"""


@pytest.mark.smoke
def test_every_module_imports_alone():
    walked = pkgutil.walk_packages(vescale_parallel.__path__, "vescale_parallel.")
    names = [module.name for module in walked]
    assert "vescale_parallel.train.plan" in names
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
