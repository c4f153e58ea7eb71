"""The page on adding an operator runs as it stands and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "adding-an-operator.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_runs_and_prints_what_it_says(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout == "".join(blocks("text"))


def test_every_name_that_the_page_imports_from_rules_is_public():
    from vescale_dtensor import rules

    found = re.findall(r"^from vescale_dtensor\.rules import (.*)$", PAGE, flags=re.MULTILINE)
    names = [name.strip() for line in found for name in line.split(",")]
    assert names
    assert set(names) <= set(rules.__all__)
