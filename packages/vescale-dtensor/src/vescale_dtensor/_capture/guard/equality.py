"""Decides when one Python value may stand for another: by identity, or as equal constants."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch

from vescale_dtensor._capture.guard.kinds import slots_of

# Immutable, and compared by value without code of the user's: exact types, no subclasses.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None))
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def same(one: Any, two: Any) -> bool:
    """Whether nothing can come of one value that does not come of the other, as they are now.

    They are one object, or equal constants of one type. Runs no code of the user's.
    """
    # Most calls end here: parameters, modules and functions are the same objects each time.
    if one is two:
        return True
    kind = type(one)
    # 1 == True == 1.0, but code that branches on the type tells them apart.
    if kind is not type(two):
        return False
    if kind in (float, complex):
        return bool(repr(one) == repr(two))  # 0.0 == -0.0, and nan != nan
    # Any other type has an `==` that may be the user's, or an op on tensors.
    if kind in _PLAIN:
        return bool(one == two)
    if isinstance(one, tuple) and not kind.__dictoffset__ and not slots_of(kind):
        # Named tuples, too: that the types are the same has been seen.
        return len(one) == len(two) and all(map(same, one, two))
    return _same_parts(kind, one, two)


def _same_parts(kind: type, one: Any, two: Any) -> bool:
    """Whether slices, ranges, bound methods, partials and frozensets have the same parts."""
    if kind in (slice, range):
        # Ranges that give the same numbers are equal, and may have ends that differ.
        return same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    if kind is MethodType:
        # Python makes a bound method anew each time one is asked for.
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    if kind is partial:
        # By identity of what it calls, and with the order of the keywords, which `**kwargs` shows.
        named = tuple(one.keywords.items()), tuple(two.keywords.items())
        alike = one.func is two.func and same(one.args, two.args) and same(*named)
        return alike and not (vars(one) or vars(two))
    return kind is frozenset and bool(exactly(one) == exactly(two))


def exactly(value: Any) -> Any:
    """What compares equal, by `==` and as an element of sets, for the same values only.

    For sets and keys of dicts, whose own `==` takes 1 for True, at any depth. Sets that a loop goes
    through in another order are not the same.
    """
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)
    if kind in _PLAIN:
        return kind, value
    if kind is tuple:
        return kind, tuple(map(exactly, value))
    if kind in (set, frozenset):
        return kind, tuple(map(exactly, value))
    # Without `==`, which may be the user's and leave attributes out.
    return kind, _ById(value)


class _ById:
    """An object compared by identity; held, so that no other gets its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and same(self.value, other.value)

    def __hash__(self) -> int:
        # By type alone: equal partials and methods are other objects each time.
        return hash(type(self.value))
