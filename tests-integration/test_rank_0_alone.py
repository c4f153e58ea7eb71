"""What rank 0 does alone with a distributed model ends by itself, and names the missing rank."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
import vescale_ckpt
from vescale_comm import bound_waits
from vescale_parallel import Plan, mesh, parallelize

weights = {"*.weight": "dp:0"} if sys.argv[1] == "save" else {}
PLAN = Plan(parameters=weights | {"*": "replicate"})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
parallelize(model, mesh(dp=2, device_type="cpu", timeout=12), PLAN)
bound_waits(timeout=12, report_after=3)
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
    if sys.argv[1] == "checkpoint":
        vescale_ckpt.save(sys.argv[2], model.state_dict())
    if sys.argv[1] == "update":
        optimizer.step()
"""


def ended(what: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(script), what, str(folder / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    return done


@pytest.mark.parametrize("what", ["print", "evaluate", "save"])
def test_it_ends_and_says_who_is_missing(what: str, tmp_path: Path):
    done = ended(what, tmp_path)
    # No number of this rank alone was passed on as if it were global.
    assert done.stdout == ""
    assert "RankFailedError" in done.stderr
    assert "rank 1: reached the end of its program" in done.stderr


def test_a_checkpoint_is_given_up_with_the_timeout_of_the_mesh(tmp_path: Path):
    done = ended("checkpoint", tmp_path)
    assert "rank 0: waiting in save over ranks 0, 1" in done.stderr
    assert "missing: rank 1" in done.stderr
    assert "rank 1: reached the end of its program" in done.stderr
    assert "CoordinationError: save(" in done.stderr
    assert not (tmp_path / "saved").exists()


def test_an_update_after_which_nothing_is_sent_is_told_at_the_end(tmp_path: Path):
    done = ended("update", tmp_path)
    assert "CommMismatchError: the ranks have diverged (ranks 0, 1 execute" in done.stderr
    assert "SGD.step with lr=0.1" in done.stderr
    assert "rank 1: the end of the program" in done.stderr
