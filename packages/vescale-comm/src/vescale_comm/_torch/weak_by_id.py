"""Caches values for objects by their identity, without keeping these alive."""

import weakref
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class WeakById(Generic[Key, Value]):
    """Maps objects to values for as long as they live.

    Unlike `weakref.WeakKeyDictionary` it does not compare keys: two device meshes of the same ranks
    are equal, but may belong to different worlds of process groups.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, key: Key) -> Value | None:
        """Return the value for this very object, or None."""
        entry = self._entries.get(id(key))
        # A new object may have the address of one that died a moment ago.
        return entry[1] if entry is not None and entry[0]() is key else None

    def setdefault(self, key: Key, value: Value) -> Value:
        """Return the value for this very object; the given one becomes it if there is none."""
        known = self.get(key)
        if known is not None:
            return known
        address = id(key)

        def _forget(reference: "weakref.ref[Any]") -> None:
            entry = self._entries.get(address)
            if entry is not None and entry[0] is reference:
                del self._entries[address]

        self._entries[address] = (weakref.ref(key, _forget), value)
        return value

    def __len__(self) -> int:
        return len(self._entries)
