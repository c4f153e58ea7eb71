"""Long tables of cases: each day runs another part of them, and `-m slow` the rest."""

import zlib
from datetime import UTC, datetime

import pytest


def rotating(names, share):
    """Parameters of which one in `share` is for today; the others are marked slow."""
    day = f"{datetime.now(UTC):%Y%m%d}"

    def is_todays(name):
        return zlib.crc32(f"{day} {name}".encode()) % share == 0

    return [pytest.param(n, marks=() if is_todays(n) else pytest.mark.slow) for n in names]
