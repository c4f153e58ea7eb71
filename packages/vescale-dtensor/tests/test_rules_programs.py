"""Random programs of twenty ops over random layouts give one device's values and gradients."""

from __future__ import annotations

from math import prod

import pytest
from rule_programs import program, run_programs
from vescale_comm.testing import run

LENGTH = 20


def check(sizes, seeds):
    by_rank = run(run_programs, prod(sizes), sizes, list(seeds), LENGTH, timeout=250)
    for rows in zip(*by_rank, strict=True):
        told = [words for _, words in rows if words and "another rank" not in words]
        seed = rows[0][0]
        names = [step[0] for step in program(seed, LENGTH)]
        assert not any(words for _, words in rows), f"seed {seed}: {names}\n{told}"


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_programs(sizes):
    check(sizes, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 1), (3,)])
def test_many_programs(sizes):
    check(sizes, range(100, 200))
