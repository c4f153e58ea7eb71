"""Long tables of cases: each day runs another part of them, and `-m slow` the rest."""

import zlib
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest


def is_todays(name, share):
    """Whether a case is among the one in `share` that run today."""
    return zlib.crc32(f"{datetime.now(UTC):%Y%m%d} {name}".encode()) % share == 0


@cache
def _shares():
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return {key: int(share) for key, share in (line.split() for line in lines if line[0] != "#")}


def share_of(item, tests):
    """One in how many runs takes a test of the folder `tests`."""
    file = item.path.relative_to(tests).with_suffix("").as_posix()
    share = _shares().get(f"{file}::{item.originalname}")
    return share or (_shares().get(file, 1) if hasattr(item, "callspec") else 1)


def rotating(names, share):
    """Parameters of which one in `share` is for today; the others are marked slow."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[is_todays(name, share)]) for name in names]
