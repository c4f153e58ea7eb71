"""Property: each block of the README runs when it is copied alone, and prints what the README says.

Those for torchrun run on two ranks, of which the first alone prints; in the slow tests by torchrun
itself. One needs transformers; the one in JAX is in `frameworks`.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PAIRS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
TORCHRUN = [pair for pair in PAIRS if pair[0].startswith("# torchrun")]
ALONE = [pair for pair in PAIRS if not pair[0].startswith("#")]


def printed_by(code):
    before = torch.get_rng_state()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    torch.set_rng_state(before)
    return out.getvalue()


def check_installed(code):
    if "import GPT2" in code and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")


def test_every_block_says_what_it_prints():
    assert len(PAIRS) == README.count("```py") == len(ALONE) + len(TORCHRUN) + 1
    assert len(TORCHRUN) == 5


@pytest.mark.parametrize("number", range(len(ALONE)))
def test_a_block_alone(number):
    code, expected = ALONE[number]
    assert printed_by(code) == expected


def run_block(rank, world_size, code):
    os.environ["WORLD_SIZE"] = str(world_size)  # as torchrun would
    # The worker's own group serves other tests after this one.
    return printed_by(code.replace("torch.distributed.destroy_process_group()\n", ""))


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.parametrize("number", range(len(TORCHRUN)))
def test_a_block_on_two_ranks(number):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    code, expected = TORCHRUN[number]
    check_installed(code)
    assert testing.run(run_block, 2, code) == [expected, ""]


# By torchrun: the wheel needs nothing else. The rest is slow.
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(TORCHRUN)))]
)
def test_a_block_by_torchrun(number, tmp_path):
    code, expected = TORCHRUN[number]
    check_installed(code)
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", "2", str(script)]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected
