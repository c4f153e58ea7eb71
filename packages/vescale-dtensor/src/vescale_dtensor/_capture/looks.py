"""What objects of the standard library hold that is in no attribute."""

from __future__ import annotations

from collections.abc import Callable
from decimal import getcontext
from gc import get_referents
from itertools import chain
from typing import Any

from vescale_dtensor._capture.equality import same


class Steady:
    """Asks for a value that is made anew each time; gives the first object while they are the same.

    Guards compare by identity first, and what never is identical takes them far longer.

    Attributes:
        look: gives the value.
    """

    __slots__ = ("_first", "look")

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look: Any = look  # a partial, mostly, of which the guard asks what it calls
        self._first = look()

    def __call__(self) -> Any:
        """The value."""
        now = self.look()
        return self._first if same(now, self._first) else now


def in_cache(value: Any) -> Any:
    """The keys and results that a cached function has remembered."""
    found = get_referents(value)
    # CPython gives keys and results first if their number is bounded, then a dict of all, and the
    # function.
    last = max((i for i, each in enumerate(found) if each is value.__wrapped__), default=None)
    if last is None:  # somebody has set another `__wrapped__`
        return tuple(each for each in found if each is not value.__dict__)
    table = found[last - 1]
    return (*found[: last - 1], *chain.from_iterable(tuple(table.items())))


def referents(value: Any) -> Any:
    """What an object in C refers to: the object behind `super()`, the class behind an alias."""
    return tuple(get_referents(value))


def in_context(value: Any) -> Any:
    """The variables of a context that is not the current one, with their values."""
    return tuple(chain.from_iterable(value.items()))


def handling(value: Any) -> Any:
    """What decides which messages a handler takes, and how it writes them; not where to."""
    return value.level, value.name, value.formatter, *value.filters


def decimals() -> Any:
    """How this thread calculates with decimals."""
    return repr(getcontext())


def level_of(value: Any) -> Any:
    """What decides which messages a logger lets pass, and where they go."""
    above = value.getEffectiveLevel(), value.manager.disable
    handlers = tuple(value.handlers), tuple(value.filters)
    return value.level, *above, value.disabled, value.propagate, value.name, *handlers
