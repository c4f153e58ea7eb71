"""Every name that torch's parser takes for an argument, of every entry of its operator database.

By name in both orders, and by each of NumPy's names, on the function and on the method: as on one
device. `-m slow` takes all entries.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest
import vescale_dtensor

sys.path.insert(0, str(Path(__file__).parents[2] / "opinfo"))

from _entries import dtype_of, entries, samples
from _forms import forms
from _judge import EXCLUDED, Effort, judge

PART = 2  # entries
FAILED = {"wrong", "raised"}


def names():
    """All entries that are called with tensors, and whose arguments have names."""
    every = entries()
    spelled = [n for n in every if any(form.spelled for form in forms(every[n]))]
    return [n for n in spelled if n not in EXCLUDED and dtype_of(every[n]) is not None]


def judge_names(name, most=4):
    """What went wrong with an entry and so many of its samples, in words."""
    if not any(sample.tensors() for sample in samples(name, most, 0)):
        return []
    effort = Effort(samples=most, seed=0, spelled_only=True)
    found = judge(name, vescale_dtensor, effort, lambda trial: None)
    assert (found.status in FAILED) == bool(found.failures)
    return [f"{name}: {f['trial']}: {f['error']}" for f in found.failures]


@pytest.mark.timeout(600)
def test_a_part_of_all_entries():
    part = sorted(names(), key=lambda name: zlib.crc32(name.encode()))[:PART]
    found = [problem for name in part for problem in judge_names(name, most=1)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_all_entries(part):
    every = names()
    assert len(every) > 300
    found = [problem for name in every[part::4] for problem in judge_names(name)]
    assert not found, "\n".join(found)
