"""Reads what other ranks have left in the store: what is no word of a rank is passed over."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_BYTES = 1 << 24


def parsed_json(text: bytes | None, make: Callable[[Any], T]) -> T | None:
    """Return what `make` makes of JSON; None where there is none, or it makes nothing of it.

    The threads that read it have to live on: whatever else uses the store may write there.
    """
    if text is None or len(text) > _MOST_BYTES:
        return None
    try:
        return make(json.loads(text))
    # Not of the form that a rank writes: other types, too few parts, no JSON, bottomless nesting.
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def ranks_of(said: Any) -> tuple[int, ...]:
    """Return ranks; raises TypeError for anything else."""
    if not isinstance(said, list) or any(type(one) is not int for one in said):
        raise TypeError("no list of ranks")
    return tuple(said)


def text_of(said: Any) -> str:
    """Return a text; raises TypeError for anything else."""
    if not isinstance(said, str):
        raise TypeError("no text")
    return said
