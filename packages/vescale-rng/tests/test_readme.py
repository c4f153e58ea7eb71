"""Property: the README's example runs and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_it_says():
    found = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    before = torch.get_rng_state()
    for code, expected in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "readme"})
        assert printed.getvalue() == expected
    torch.set_rng_state(before)
