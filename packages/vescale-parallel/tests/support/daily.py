"""Long tables of cases: each day runs another part of them, and `-m slow` the rest."""

import zlib
from datetime import UTC, datetime


def is_todays(name: str, share: int) -> bool:
    """Whether a case is among the one in `share` that run today."""
    return zlib.crc32(f"{datetime.now(UTC):%Y%m%d} {name}".encode()) % share == 0
