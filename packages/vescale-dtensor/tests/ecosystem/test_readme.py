"""The examples of the README and its guides run as scripts and print what is said there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2]
GUIDES = [page for page in sorted(PACKAGE.glob("docs/*.md")) if page.stem != "adding-an-operator"]
PAGES = [page.read_text() for page in (PACKAGE / "README.md", *GUIDES)]  # that one has own tests
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", flags=re.DOTALL)
EXAMPLES = [example for page in PAGES for example in EXAMPLE.findall(page)]


def test_every_example_has_its_output():
    assert len(EXAMPLES) == sum(page.count("```python") for page in PAGES) > 4


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_print_what_they_say(number, tmp_path):
    code, printed = EXAMPLES[number]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == printed
