"""The examples of the README run as scripts and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)


def test_every_example_has_its_output():
    assert len(EXAMPLES) == README.count("```python")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_print_what_they_say(number, tmp_path):
    code, printed = EXAMPLES[number]
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout == printed
