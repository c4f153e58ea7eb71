"""Property: the README's examples run and print what the README says."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_it_says():
    found = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    before = torch.get_rng_state()
    for code, expected in found:
        if code.startswith("# torchrun"):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "readme"})
        assert printed.getvalue() == expected
    torch.set_rng_state(before)


def test_the_script_of_several_ranks_prints_what_it_says(tmp_path):
    """By torchrun: the wheel needs nothing else."""
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    ((code, expected),) = [block for block in blocks if block[0].startswith("# torchrun")]
    script = tmp_path / "stock.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", "--local-ranks-filter", "0", str(script)]
    ran = subprocess.run(
        command + options, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected
