"""Every name that torch's parser takes for an argument, of every entry of its operator database.

By name in both orders, and by each of NumPy's names, on the function and on the method: as on one
device. Each run takes another part of the entries, drawn by the date, and `-m slow` all of them. A
failure names the seed, with which `judge_names(name, seed)` runs it again.
"""

from __future__ import annotations

import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
import vescale_dtensor

sys.path.insert(0, str(Path(__file__).parents[2] / "opinfo"))

from _entries import dtype_of, entries, samples
from _forms import forms
from _judge import EXCLUDED, Effort, judge

PART = 2  # entries
SEED = int(f"{datetime.now(UTC):%Y%m%d}")
FAILED = {"wrong", "raised"}


def names():
    """All entries that are called with tensors, and whose arguments have names."""
    every = entries()
    spelled = [n for n in every if any(form.spelled for form in forms(every[n]))]
    return [n for n in spelled if n not in EXCLUDED and dtype_of(every[n]) is not None]


def judge_names(name, seed, most=4):
    """What went wrong with an entry and so many of its samples, in words."""
    if not any(sample.tensors() for sample in samples(name, most, seed)):
        return []
    effort = Effort(samples=most, seed=seed, spelled_only=True)
    found = judge(name, vescale_dtensor, effort, lambda trial: None)
    assert (found.status in FAILED) == bool(found.failures)
    return [f"{name}: {f['trial']}: {f['error']}" for f in found.failures]


@pytest.mark.timeout(600)
def test_a_part_of_all_entries_that_rotates():
    part = sorted(names(), key=lambda n: zlib.crc32(f"{SEED} {n}".encode()))[:PART]
    found = [problem for name in part for problem in judge_names(name, SEED, most=1)]
    assert not found, f"seed {SEED}\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_all_entries(part):
    every = names()
    assert len(every) > 300
    found = [problem for name in every[part::4] for problem in judge_names(name, SEED)]
    assert not found, f"seed {SEED}\n" + "\n".join(found)
