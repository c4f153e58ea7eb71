"""The README's example prints what the README says, on one process and on every rank of four."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


def example():
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    printed = re.search(r"```text\n(.*?)```", text, re.DOTALL).group(1)
    return code, printed.split("\n")[:-1]


def run(command, folder):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_one_process(tmp_path):
    code, printed = example()
    (tmp_path / "example.py").write_text(code)
    assert run([sys.executable, "example.py"], tmp_path).splitlines() == printed


@pytest.mark.slow
def test_on_every_rank_of_four(tmp_path):
    code, printed = example()
    (tmp_path / "example.py").write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    output = run([*launch, "--nproc-per-node", "4", "example.py"], tmp_path)
    for line in printed:
        assert output.count(line) == 1  # by the first rank
