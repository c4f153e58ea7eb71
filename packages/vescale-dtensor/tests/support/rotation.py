"""Long tables of cases: each day runs another part of them, and `-m slow` the rest."""

import zlib
from datetime import UTC, datetime

import pytest


def is_todays(name, share):
    """Whether a case is among the one in `share` that run today."""
    return zlib.crc32(f"{datetime.now(UTC):%Y%m%d} {name}".encode()) % share == 0


def rotating(names, share):
    """Parameters of which one in `share` is for today; the others are marked slow."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[is_todays(name, share)]) for name in names]
