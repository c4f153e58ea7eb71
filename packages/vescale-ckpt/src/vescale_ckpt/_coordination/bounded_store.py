"""A store whose every call ends, also where a network has cut it off and nobody answers.

torch leaves timeouts to the server: a call on a dead connection would wait for ever.
"""

import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from vescale_ckpt._coordination.meeting import Store

# A server that many thousand ranks keep busy answers within this.
ANSWER_SECONDS = 12.0

_Answers = SimpleQueue[tuple[Any, BaseException | None]]
_Calls = SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Answers] | None]


class BoundedStore:
    """What is asked of `store`, in a thread of its own; RuntimeError where no answer comes."""

    def __init__(self, store: Store, seconds: float = ANSWER_SECONDS) -> None:
        self._store, self._seconds, self._lost = store, seconds, False
        self.timeout = getattr(store, "timeout", None)
        self._calls: _Calls = SimpleQueue()
        Thread(target=_serve, args=(self._calls,), name="vescale-ckpt-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        return int(self._ask(self._store.add, key, amount))

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        self._ask(self._store.set, key, value)

    def get(self, key: str, /) -> bytes:
        """Return a value that is there."""
        return bytes(self._ask(self._store.get, key))

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have a value."""
        return bool(self._ask(self._store.check, keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is as expected ("": not there); returns the value of now."""
        return bytes(self._ask(self._store.compare_set, key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        """Remove a value."""
        return bool(self._ask(self._store.delete_key, key))

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._lost:
            raise RuntimeError("the store of the process group did not answer before")
        answers: _Answers = SimpleQueue()
        self._calls.put((method, arguments, answers))
        try:
            found, error = answers.get(timeout=self._seconds)
        except Empty:
            self._lost = True
            raise RuntimeError(
                f"the store of the process group has not answered for {self._seconds:g} s: this "
                "rank is cut off from it, or the process that serves it stands still"
            ) from None
        if error is not None:
            raise error
        return found


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        method, arguments, answers = call
        try:
            answers.put((method(*arguments), None))
        except BaseException as error:
            answers.put((None, error))
        del call, method, arguments, answers  # while this waits for the next one
