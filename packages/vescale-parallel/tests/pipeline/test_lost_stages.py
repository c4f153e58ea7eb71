"""A stage that dies or hangs is named by every other rank, and nobody waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

PROGRAM = """
import os, sys, time, torch
from torch import nn
from vescale_parallel import Pipeline, Plan, forward_backward, mesh, parallelize

how, rank = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(6)]
model = nn.Sequential(*blocks)
stages = Plan(pipeline=Pipeline(stages="?"), microbatches=4)
parallelize(model, mesh(pp=3, device_type="cpu", timeout=8), stages)
rows, targets = torch.randn(8, 8), torch.randn(8, 8)
step = lambda: forward_backward(model, rows, loss=(nn.functional.mse_loss, targets))
step()
calls = 0

def lose(module, args):
    global calls
    calls += 1
    if rank == 1 and calls == 2:
        os._exit(9) if how == "dies" else time.sleep(60)

blocks[2].register_forward_pre_hook(lose)
try:
    step()
    print("no error", flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
# Rank 0 holds the store in which ranks look for others, as no launcher does: let them.
time.sleep(10)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_every_other_rank_names_it(how: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = str(free_port())
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks, said = [], [tmp_path / f"{rank}.txt" for rank in range(3)]
    for rank, file in enumerate(said):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(program), how]
        with file.open("w") as out:
            ranks.append(subprocess.Popen(command, env=os.environ | here | own, stdout=out))
    try:
        # The one that is lost says nothing, and is ended below where it hangs.
        for rank in (0, 2):
            ranks[rank].wait(120)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    told = [said[rank].read_text() for rank in (0, 2)]
    print(*told, sep="\n")
    for words in told:
        assert "rank 1" in words, words
