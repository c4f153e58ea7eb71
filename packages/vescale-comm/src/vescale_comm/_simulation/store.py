"""The key-value store of a simulated world: a dict whose `wait` lets other ranks run."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

Wait = Callable[[Callable[[], bool], str], None]


class SimulatedStore(Store):
    """Key-value store that all ranks share.

    Args:
        wait_until: of the scheduler.
    """

    def __init__(self, wait_until: Wait) -> None:
        super().__init__()
        self._data: dict[str, bytes] = {}
        self._wait_until = wait_until

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._data[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return a key's value when it is there."""
        self.wait([key])
        return self._data[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        # As text, which is how torch's stores keep counters: `get` of one returns the same bytes.
        total = int(self._data.get(key, b"0")) + amount
        self._data[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key that has the expected value, or is not there where none is expected."""
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._data.get(key, b"") == old:
            self.set(key, desired)
        return self._data.get(key, old)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._data.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return all(key in self._data for key in keys)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._data)

    # The names by which torch's C++ finds a store's methods in Python.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are there. Times out only when no rank can go on."""
        # `timeout` is ignored: there is no clock here, a wait that cannot end is a deadlock at
        # once.
        self._wait_until(lambda: self.check(keys), f"store.wait({keys})")
