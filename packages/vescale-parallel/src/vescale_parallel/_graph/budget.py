"""Bytes that a graph may take, as users say them."""

from __future__ import annotations

from typing import Final

from vescale_parallel._common.messages import bytes_in
from vescale_parallel._errors import GraphError

Bytes = int | float | str
"""A number of bytes, or text: "24GB" is 24e9 of them, "24GiB" are 24 * 2**30."""
_FORMS: Final = "a number of bytes, at least one, or text such as '24GiB' or '24GB'"


def bytes_of(name: str, value: Bytes) -> int:
    """Return the bytes that an argument asks for, rounded down.

    Args:
        name: of the function and its argument, as the message calls them.
        value: what was given.

    Raises:
        GraphError: it says no number of bytes.
    """
    number = bytes_in(value) if isinstance(value, str) else value
    # To Python a bool is a number.
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or number is None or not 1 <= number < float("inf"):
        raise GraphError(f"{name}={value!r}: {_FORMS}")
    return int(number)
