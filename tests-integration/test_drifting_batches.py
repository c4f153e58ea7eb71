"""A loader or an augmentation that comes to differ on one rank is named, after good batches too."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from vescale_parallel import Plan, mesh, parallelize

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
sizes = {sys.argv[1]: 2}
plan = Plan(batch="dp:0", parameters={"0.*": "tp:0", "2.weight": "tp:1", "*": "replicate"})
parallelize(model, mesh(**sizes, device_type="cpu", timeout=60), plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    batch = torch.full((4, 8), float(step))
    if step == 5 and torch.distributed.get_rank() == 1:
        batch = batch.neg()  # a rank augments as it likes
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
print("finished")
"""


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_the_rank_with_another_batch_is_named(axis: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script), axis]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "finished" not in done.stdout
    assert "CommMismatchError" in done.stderr
    assert "made of other data" in done.stderr
    assert "script.py:" in done.stderr
