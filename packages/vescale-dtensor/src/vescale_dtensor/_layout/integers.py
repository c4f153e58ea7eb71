"""Numbers in placements as plain ints: placements that are equal also print and hash alike."""

from __future__ import annotations

from collections.abc import Iterable
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


def integers(what: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Return plain ints for many values at once; see `integer`."""
    found = tuple(values)
    # Nearly always they are ints already. There is one for each rank, so no call is made for each.
    return found if set(map(type, found)) <= {int} else tuple(integer(what, v) for v in found)


def make_integers(placement: object, *names: str) -> None:
    """Replace attributes of a frozen placement that is being made by plain ints.

    Raises:
        LayoutError: one of them is no integer.
    """
    for name in names:
        value = integer(f"{type(placement).__name__}({name})", getattr(placement, name))
        object.__setattr__(placement, name, value)
