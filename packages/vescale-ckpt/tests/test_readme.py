"""Each block of the README and its guides runs when copied alone, and prints what is said there.

Each has a namespace of its own. Those for torchrun run on every rank of several, and the first one
alone prints; in the slow tests torchrun itself starts them.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vescale_ckpt

PACKAGE = Path(__file__).parent.parent
README = PACKAGE / "README.md"
PAGES = [page.read_text() for page in (README, *sorted(PACKAGE.glob("docs/*.md")))]
PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
PAIRS = [pair for page in PAGES for pair in PAIR.findall(page)]
ALONE = [pair for pair in PAIRS if not pair[0].startswith("# torchrun")]
# How many processes each run of a script has; the second finds what the first has saved.
TORCHRUN = [(*pair, (4, 2)) for pair in PAIRS if pair[0].startswith("# torchrun")]


def printed_by(code, folder):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(folder):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def test_every_block_says_what_it_prints():
    assert len(PAIRS) == sum(page.count("```py") for page in PAGES)
    assert (len(ALONE), len(TORCHRUN)) == (9, 2)


# DCP warns of what its block asks for.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("number", range(len(ALONE)))
def test_a_block_alone(number, tmp_path):
    code, printed = ALONE[number]
    assert printed_by(code, tmp_path) == printed


def run_block(rank, world_size, code, folder):
    os.environ["WORLD_SIZE"] = str(world_size)  # as torchrun would
    return printed_by(code, folder)


@pytest.mark.parametrize("number", range(len(TORCHRUN)))
def test_a_block_on_many_ranks(number, tmp_path):
    testing = pytest.importorskip("vescale_comm.testing", reason="vescale-comm is not installed")
    code, printed, sizes = TORCHRUN[number]
    found = [testing.run(run_block, size, code, str(tmp_path)) for size in sizes]
    assert "".join("".join(ranks) for ranks in found) == printed


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TORCHRUN)))
def test_a_block_by_torchrun(number, tmp_path):
    code, printed, sizes = TORCHRUN[number]
    (tmp_path / "script.py").write_text(code)
    said = ""
    for size in sizes:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *launch, "script.py"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        said += ran.stdout
    assert said == printed


def test_every_public_name_is_in_the_readme_and_documented():
    text = README.read_text()
    for name in vescale_ckpt.__all__:
        if name != "__version__":
            assert f"`{name}" in text, name
            assert getattr(vescale_ckpt, name).__doc__, name
