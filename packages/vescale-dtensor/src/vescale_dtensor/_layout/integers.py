"""Numbers in placements as plain ints: placements that are equal also print and hash alike."""

from __future__ import annotations

from operator import index
from typing import Any

from vescale_dtensor._errors import LayoutError


def integer(what: str, value: Any) -> int:
    """Return a plain int for anything that is an integer: a bool, or one of numpy's.

    Args:
        what: which argument this is, for the message.
        value: as it was passed.

    Raises:
        LayoutError: it is no integer. `int` would drop what follows the point.
    """
    try:
        # `index` refuses what is no integer; `int` makes a 1 of True, which `index` leaves.
        return int(index(value))
    except TypeError:
        raise LayoutError(f"{what}: expected an integer, found {value!r}") from None


def make_integers(placement: object, *names: str) -> None:
    """Replace attributes of a frozen placement that is being made by plain ints.

    Raises:
        LayoutError: one of them is no integer.
    """
    for name in names:
        value = integer(f"{type(placement).__name__}({name})", getattr(placement, name))
        object.__setattr__(placement, name, value)
