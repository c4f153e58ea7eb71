"""Property: arrays of other frameworks get the numbers of one device, without torch.distributed.

In a process of their own: JAX decides about its devices once, when it is first used.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
PAIRS = re.findall(r"```python\n(# needs jax\n.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)


def printed_by(code):
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_example_in_jax():
    pytest.importorskip("jax", reason="jax is not installed")
    ((code, expected),) = PAIRS
    assert printed_by(code) == expected


def test_arrays_of_jax_are_refused_with_the_way_round():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    from vescale_rng import LayoutError, Normal, fill_

    with pytest.raises(LayoutError, match=r"cannot be written: fill a numpy array"):
        fill_(jax.numpy.zeros((2, 2)), Normal())


NUMPY = """
import sys
import numpy
import torch
from vescale_rng import Normal, fill_, layout_of_slices, use, whole

def normal(shape, slices, seed):
    layout = layout_of_slices(shape, slices)
    local = numpy.empty(layout.local_shape, numpy.float32)
    with use("portable"):
        return fill_(local, Normal(), layout, torch.Generator().manual_seed(seed))

one = normal((10, 6), (), 0)
rows = [normal((10, 6), numpy.s_[begin : begin + 3], 0) for begin in (0, 3, 6, 9)]
columns = [normal((10, 6), numpy.s_[:, begin : begin + 2], 0) for begin in (0, 2, 4)]
assert (numpy.concatenate(rows) == one).all()
assert (numpy.concatenate(columns, 1) == one).all()
assert not torch.distributed.is_initialized()
print("torch.distributed.tensor" in sys.modules)
"""


def test_numpy_and_nothing_else():
    assert printed_by(NUMPY) == "False\n"
