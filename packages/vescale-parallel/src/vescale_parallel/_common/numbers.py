"""Numbers on a command line: within bounds, or an error that names the option."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Final

MOST: Final = 10**12
"""Of what is counted: products of several such numbers are still finite."""


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Return how argparse reads a whole number of a range, both ends included."""

    def number(text: str) -> int:
        # No more digits than the bound has: Python refuses to read thousands of them.
        found = int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
        if found is None or not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number, {least} to {most:,}")
        return found

    return number


def real(least: float = 0.0, most: float = 1e9) -> Callable[[str], float]:
    """Return how argparse reads a number of a range, both ends included; NaN is in none."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: a number, {least:g} to {most:g}")
        return found

    return number
