"""The examples of the README and its guides run as scripts and print what is said there."""

import re
import runpy
from pathlib import Path

import pytest
from vescale_comm_processes import ended

PACKAGE = Path(__file__).parent.parent
PAGES = [page.read_text() for page in (PACKAGE / "README.md", *sorted(PACKAGE.glob("docs/*.md")))]
PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = [pair for page in PAGES for pair in PAIR.findall(page)]


def test_every_example_has_its_output():
    assert len(EXAMPLES) == sum(page.count("```py") for page in PAGES) == 5


def script(rank, path):
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_print_what_they_say(number, tmp_path):
    code, printed = EXAMPLES[number]
    path = tmp_path / "example.py"
    path.write_text(code)
    assert ended(script, 1, tmp_path, str(path)) == [(0, printed + "ended\n")]
