"""Every op rule equals one device: results, metadata, gradients, generator, and what is refused.

A failure names the case and its seed; `rule_fuzz.run_trials(..., [(case, seed)])` runs it again.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from zlib import crc32

import pytest
from rule_cases import CASES
from rule_fuzz import problems, run_trials
from vescale_comm import simulate
from vescale_comm.testing import run

BATCH = 120
MESHES = {"line": (4,), "square": (2, 2)}
CHUNKS = 8


def judge(sizes, jobs, ranks=run):
    """Run jobs on one mesh, each twice: the second time by the plan of the first.

    The ranks are processes, or as `ranks(program, size, ...)` runs them.
    """
    found = []
    for start in range(0, len(jobs), BATCH):
        batch = [job for job in jobs[start : start + BATCH] for _ in range(2)]
        found += problems(ranks(run_trials, prod(sizes), sizes, "rule_cases", batch))
    assert not found, f"{len(found)} of {len(jobs)} differ\n" + "\n".join(found[:20])


def sample(mesh, share):
    """A share of the cases, another one on each mesh."""
    return [(name, 0) for name in CASES if crc32(f"{mesh} {name}".encode()) % share == 0]


def every_second():
    """Every second case: of names that differ in one number the first, or the second, and so on.

    Numbers count calls or, in the table of names, the forms of one call, of which the first is
    always here; families differ in shapes, so that a call is tried with every second shape.
    """
    families = defaultdict(list)
    for name in CASES:
        families[name.rstrip("0123456789")].append(name)
    chosen = set()
    for number, (family, names) in enumerate(families.items()):
        first = 0 if family.startswith("table ") else number % 2
        chosen |= {names[0], *names[first::2]}
    return chosen


def simulated(program, size, *args):
    return simulate(size).run(program, *args)


def on_two_ranks(names):
    jobs = [(name, 0) for name in names]
    found = problems(simulated(run_trials, 2, (2,), "rule_cases", jobs))
    assert not found, f"{len(found)} of {len(jobs)} differ\n" + "\n".join(found[:20])


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_second_case_on_two_ranks(chunk):
    chosen = every_second()
    on_two_ranks([name for name in CASES if name in chosen][chunk::CHUNKS])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_other_cases_on_two_ranks(chunk):
    chosen = every_second()
    on_two_ranks([name for name in CASES if name not in chosen][chunk::CHUNKS])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sample_of_all_cases(mesh):
    judge(MESHES[mesh], sample(mesh, 64), simulated)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seed", range(4))
def test_all_cases(mesh, seed):
    judge(MESHES[mesh], [(name, seed) for name in CASES])
