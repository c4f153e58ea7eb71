"""Each block of the README and its guides runs when copied alone, and prints what is said there.

In one process and on two ranks, of which the first one alone prints.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest
from vescale_comm.testing import run

PACKAGE = Path(__file__).parent.parent
README = (PACKAGE / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted(PACKAGE.glob("docs/*.md")))]
PAIR = re.compile(r"```python\n(.*?)```\n.*?```\n(.*?)```", re.DOTALL)
PAIRS = [pair for page in PAGES for pair in PAIR.findall(page)]


def printed_by(rank: int, world_size: int, blocks: list[str], folder: str) -> list[str]:
    found = []
    for code in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(folder):
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
        found.append(out.getvalue())
    return found


def test_every_block_says_what_it_prints():
    assert len(PAIRS) == sum(page.count("```python") for page in PAGES) == 10
    # One needs other people's libraries, and stands as a program in the repository's guide.
    assert README.count("```py\n") == README.count("```py\nfrom vescale_parallel.integrations") == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_print_what_is_written(world_size: int, tmp_path):
    blocks = [code for code, _ in PAIRS]
    first, *others = run(printed_by, world_size, blocks, str(tmp_path))
    assert first == [printed for _, printed in PAIRS]
    # A block without a mesh needs no processes, and so does not know of others.
    quiet = [printed if " mesh(" not in code else "" for code, printed in PAIRS]
    assert sum(map(bool, quiet)) == 1
    for said in others:
        assert said == quiet
