"""A known call makes as many Python calls on 1,024 ranks as on 64, whatever the op and the layout.

What is counted is what this package and vescale_comm do for the second call of a kind, forward and
backward: a loop over ranks shows as hundreds of calls more.
"""

from __future__ import annotations

from zlib import crc32

import pytest
from rule_cases import CASES
from world_growth import counts, python_calls

SHARE, PART = 400, 200
# Some ranks hold nothing, where others pad, or gather otherwise: tens of calls. A loop over the
# ranks makes 960 more.
SLACK = 400


def judge(names, seed, timeout=120):
    found = counts(names, seed, timeout)
    measured = {case: pair for case, pair in found.items() if str not in map(type, pair)}
    grown = {
        case: (small, large) for case, (small, large) in measured.items() if large > small + SLACK
    }
    assert not grown, f"{len(grown)} cases make more calls on more ranks: {grown}"
    # What never arrived is zeros, which some ops refuse; most do not.
    assert len(measured) > 0.6 * len(found), found


def test_a_sample_of_all_cases():
    judge([name for name in CASES if not crc32(name.encode()) % SHARE], 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("start", range(0, len(CASES), PART))
def test_all_cases(start, seed):
    judge(list(CASES)[start : start + PART], seed, timeout=300)


def test_a_loop_is_counted():
    once, often = (python_calls(lambda: [len("") for _ in range(n)]) for n in (1, 1000))  # noqa: B023
    assert often - once == 999
