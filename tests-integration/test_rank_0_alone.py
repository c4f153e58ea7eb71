"""What rank 0 does alone with a distributed model ends by itself, and names the missing rank."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from vescale_parallel import Plan, mesh, parallelize

weights = {"*.weight": "dp:0"} if sys.argv[1] == "save" else {}
PLAN = Plan(parameters=weights | {"*": "replicate"})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
parallelize(model, mesh(dp=2, device_type="cpu", timeout=20), PLAN)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
if torch.distributed.get_rank() == 0:
    if sys.argv[1] == "print":
        print(f"the loss is {loss.item()}")
    if sys.argv[1] == "evaluate":
        print(f"the sum is {model(torch.ones(4, 8)).sum().item()}")
    if sys.argv[1] == "save":
        print({name: one.full_tensor() for name, one in model.named_parameters()})
"""


@pytest.mark.parametrize("what", ["print", "evaluate", "save"])
def test_it_ends_and_says_who_is_missing(what: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    # No number of this rank alone was passed on as if it were global.
    assert done.stdout == ""
    assert "RankFailedError" in done.stderr
    assert "rank 1: reached the end of its program" in done.stderr
