"""Views, slices and look-ups of any layout equal one device: values, gradients, writes through.

Also uneven, empty, nested, interleaved and flattened pieces. Most of them send nothing.
"""

from __future__ import annotations

from math import prod

import pytest
from vescale_comm.testing import run
from view_fuzz import run_views


def judge(sizes, seeds):
    wrong, silent, done = run(run_views, prod(sizes), sizes, seeds, timeout=300)[0]
    assert not wrong, f"{len(wrong)} of {len(seeds)} differ\n" + "\n".join(wrong[:10])
    return silent / done


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3,)])
def test_views_equal_one_device(sizes):
    assert judge(sizes, range(150)) > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3,), (2, 3)])
def test_many_views_equal_one_device(sizes):
    for start in range(1000, 5000, 500):
        judge(sizes, range(start, start + 500))
