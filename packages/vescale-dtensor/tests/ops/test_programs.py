"""Random programs of 10 to 30 ops, over random layouts and meshes, give one device's values and
gradients on all ranks, and leave the generator where it would be there.
"""

from __future__ import annotations

from math import prod

import pytest
from rule_programs import program, run_programs
from vescale_comm.testing import run

LENGTH = 20
MESHES = [(4,), (2, 2), (3,), (2, 1, 2)]


def check(sizes, seeds, length):
    by_rank = run(run_programs, prod(sizes), sizes, list(seeds), length, timeout=1200)
    for rows in zip(*by_rank, strict=True):
        told = [words for _, words in rows if words and "another rank" not in words]
        seed = rows[0][0]
        names = [step.name if step.kind == "case" else step.kind for step in program(seed, length)]
        assert not any(words for _, words in rows), f"seed {seed}: {names}\n{told}"


@pytest.mark.parametrize("sizes", MESHES)
def test_programs(sizes):
    check(sizes, range(4), LENGTH)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("sizes", [*MESHES, (2, 1), (2, 2, 2)])
@pytest.mark.parametrize("length", [10, 20, 30])
def test_many_programs(sizes, length):
    check(sizes, range(1000 * length, 1000 * length + 100), length)
