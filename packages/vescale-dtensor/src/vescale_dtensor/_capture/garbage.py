"""Whether Python collects garbage in this thread: what runs then is no part of a function.

When it collects is chance. The finalizers and `gc.callbacks` that run then (hypothesis has one that
reads a clock) are not the function's.
"""

from __future__ import annotations

import gc
from threading import get_ident
from typing import Any

_threads: set[int] = set()


def is_collecting() -> bool:
    """Whether this thread is in a collection."""
    return bool(_threads) and get_ident() in _threads


def hear_of_collections() -> None:
    """Be the first that Python tells of a collection, and the last that it tells of its end."""
    callbacks = gc.callbacks
    if callbacks and callbacks[0] is _begins and callbacks[-1] is _has_ended:
        return
    # They stay, and the list is changed for the callbacks of others only: Python walks it by index,
    # and misses one if another thread takes one out meanwhile. In this order, as a collection may
    # come between any two lines, and must not seem to go on.
    for one in (_begins, _has_ended):
        while one in callbacks:
            callbacks.remove(one)
    callbacks.append(_has_ended)
    callbacks.insert(0, _begins)
    _threads.discard(get_ident())


def _begins(phase: str, info: Any) -> None:
    if phase == "start":
        _threads.add(get_ident())


def _has_ended(phase: str, info: Any) -> None:
    if phase == "stop":
        _threads.discard(get_ident())
