"""Bounded caches for results that can be computed again, and subscriptions that empty caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that drops everything once it holds `most` entries.

    Emptying it costs time only, since every value follows from its key. Evicting the least recently
    used entry instead would make every hit write, on the fast path too. Reads are those of a dict;
    write with `store`. Safe to share between threads: each step is one operation on a dict, and two
    threads that miss store equal values.
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def store(self, key: K, value: V) -> None:
        """Store a value, after making room for it."""
        # Without a lock: threads that race here may clear twice, or pass the bound by a few
        # entries.
        if len(self) >= self.most:
            self.clear()
        self[key] = value


class Subscribers:
    """Functions to call when something changes: each cache subscribes with what empties it.

    So a lower layer need not import the layers above it that cache something derived from it.
    """

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Subscribe a function and return it, so that this serves as a decorator."""
        self._callbacks.append(callback)
        return callback

    def notify(self) -> None:
        """Call every function that subscribed."""
        for callback in self._callbacks:
            callback()
