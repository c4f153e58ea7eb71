"""The examples of the README and its guides run as scripts and print what is said there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent
PAGES = [page.read_text() for page in (PACKAGE / "README.md", *sorted(PACKAGE.glob("docs/*.md")))]
PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = [pair for page in PAGES for pair in PAIR.findall(page)]


def test_every_example_has_its_output():
    assert len(EXAMPLES) == sum(page.count("```py") for page in PAGES) == 5


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_print_what_they_say(number, tmp_path):
    code, printed = EXAMPLES[number]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == printed
