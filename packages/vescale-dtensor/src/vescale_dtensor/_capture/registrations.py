"""Which classes are registered with abstract ones: `isinstance` and `issubclass` ask that.

Python counts registrations, of all abstract classes together, and libraries register classes of
their own while they are imported: torch's compiler, the first time that it runs, is one that leads
to such imports. What a program has asked of is older than classes that came later.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, ref

_dump: Any = abc._get_dump  # type: ignore[attr-defined]

Pair = tuple["ReferenceType[type]", "ReferenceType[type]"]
"""An abstract class, and one that is registered with it."""


class Registered:
    """Asks whether a class has been registered that was there when this was made.

    Gives the same object as long as none has.
    """

    __slots__ = ("_first", "_modules", "_token", "_was")

    def __init__(self) -> None:
        self._first = self._token = abc.get_cache_token()
        self._was = _registrations(self._token)
        self._modules = frozenset(sys.modules)

    def __call__(self) -> object:
        """What it gave before, or another number."""
        now = abc.get_cache_token()
        if now == self._token:
            return self._first
        if all(self._is_later(one()) for _, one in _registrations(now) - self._was):
            self._token = now  # the next time it is asked no more
            return self._first
        return now

    def _is_later(self, cls: type | None) -> bool:
        """Whether a class came with a module that was not imported yet."""
        # Not an abstract one, with which others may be registered. One that is gone has no objects.
        return cls is None or (
            type(cls) is type
            and cls.__module__ not in self._modules
            and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        )


@lru_cache(maxsize=4)
def _registrations(token: object) -> frozenset[Pair]:
    """All that are registered, when Python's count of them is `token`."""
    return frozenset(
        (ref(one), other) for one in _abstract() for other in _dump(one)[0] if other() is not None
    )


def _abstract() -> Iterator[type]:
    """The abstract classes that there are."""
    seen: set[type] = set()
    queue: list[type] = [object]
    while queue:
        below: list[type] = type.__subclasses__(queue.pop())
        for cls in below:
            if cls not in seen:
                seen.add(cls)
                queue.append(cls)
                if isinstance(cls, abc.ABCMeta):
                    yield cls
