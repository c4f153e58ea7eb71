"""The README's examples run and print what is written there, in one process and on two ranks."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from vescale_comm.testing import run

README = Path(__file__).parent.parent / "README.md"


def output_of(rank: int, world_size: int, code: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "README.md", "exec"), {})
    return said.getvalue()


@pytest.mark.parametrize("world_size", [1, 2])
def test_examples_print_what_is_written(world_size: int):
    blocks = re.findall(r"```python\n(.*?)```\n.*?```\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 4
    # Consecutive snippets: later ones use names of the first.
    code = "".join(code for code, _ in blocks)
    for said in run(output_of, world_size, code):
        assert said == "".join(printed for _, printed in blocks)
