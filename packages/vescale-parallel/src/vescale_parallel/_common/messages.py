"""Small helpers for messages: lists of names, and the names nearest to a wrong one."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final

import torch


def listed(names: Iterable[object], limit: int = 6) -> str:
    """Return the names in one line, quoted, the surplus counted: `'a', 'b' and 3 more`."""
    all_names = [str(name) for name in names]
    shown = ", ".join(f"'{name}'" for name in all_names[:limit])
    surplus = len(all_names) - limit
    return f"{shown} and {surplus} more" if surplus > 0 else shown


def nearest(wrong: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names that look most like `wrong`, best first; empty when none does."""
    # Each name once: a name that comes twice would take the place of another.
    return difflib.get_close_matches(wrong, list(dict.fromkeys(names)), limit, cutoff=0.5)


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no name is near."""
    near = nearest(wrong, names, limit=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def count(number: int, noun: str) -> str:
    """`1 rule`, `2 rules`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(number: int) -> str:
    """Return a byte count for people: `1.5 MiB`."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


_BYTES: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 3, "M": 6, "G": 9, "T": 12}


def bytes_in(text: str) -> float | None:
    """Return bytes from `80GB` (powers of ten) or `80GiB` (powers of two); None of other text."""
    found = _BYTES.fullmatch(text)
    if found is None:
        return None
    power = _POWERS[found[2].upper()]
    unit: int = 2 ** (power // 3 * 10) if found[3] else 10**power
    return float(found[1]) * unit


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as a plan names it: `float32`."""
    return str(dtype).removeprefix("torch.")


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> str:
    """Return rows in aligned columns under a header; `right` names the columns to align right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    # Widths from the header too: a column of short cells under a long title stays aligned.
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    to_right = {header.index(name) for name in right}

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    # Two spaces between columns, none at the ends: tables are pasted into documents and diffs.
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])
