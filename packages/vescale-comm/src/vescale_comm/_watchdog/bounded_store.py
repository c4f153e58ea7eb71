"""A store whose every call ends, also where a network has cut it off and nobody answers.

torch leaves timeouts to the server, so that a call on a dead connection waits for ever, and with it
whoever waits for the lock that its caller holds. A store that was silent and answers at last, as
after a moment's trouble of the network, is used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

# A server that many thousand ranks keep busy answers within this. A store that takes longer, and
# somewhat more for the way, has gone.
ANSWER_SECONDS, _WAY_SECONDS = 10.0, 2.0

_Answers = SimpleQueue[tuple[Any, BaseException | None]]
_Calls = SimpleQueue[tuple[str, tuple[Any, ...], _Answers] | None]


_T = TypeVar("_T")


class StoreLostError(RuntimeError):
    """The store does not answer: it may do so later."""


def connected(store: Any, prefix: str) -> BoundedStore:
    """Return the keys of a store under a prefix, by a connection of its own.

    Raises:
        StoreLostError: the store does not answer.
    """
    own = in_time(store.clone, ANSWER_SECONDS + _WAY_SECONDS)
    return BoundedStore(own, prefix, ANSWER_SECONDS)


class BoundedStore:
    """Keys of a store, under a prefix. Every method may raise RuntimeError: it is gone.

    Args:
        store: torch's; only this object uses it.
        prefix: of all keys.
        seconds: for an answer.
    """

    def __init__(self, store: Store, prefix: str, seconds: float = ANSWER_SECONDS) -> None:
        store.set_timeout(timedelta(seconds=seconds))
        self._line, self._prefix = _Line(store, seconds + _WAY_SECONDS), prefix

    def within(self, prefix: str) -> BoundedStore:
        """Return the keys under a further prefix."""
        found = object.__new__(BoundedStore)
        found._line, found._prefix = self._line, f"{self._prefix}/{prefix}"
        return found

    @property
    def is_silent(self) -> bool:
        """Whether a call was not answered in time, and has not been since."""
        return self._line.is_silent

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; return what it is then."""
        return int(self._line.ask("add", f"{self._prefix}/{key}", amount))

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._line.ask("set", f"{self._prefix}/{key}", value)

    def append(self, key: str, value: str) -> None:
        """Write behind what is there."""
        self._line.ask("append", f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        """Return a value; None where there is none."""
        # Asked for only where it is there: torch's get waits for a key that is not.
        return bytes(self._line.ask("get", f"{self._prefix}/{key}")) if self.check(key) else None

    def check(self, key: str) -> bool:
        """Return whether there is a value."""
        return bool(self._line.ask("check", [f"{self._prefix}/{key}"]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if it is as expected ("": not there); return the value of now."""
        return bytes(self._line.ask("compare_set", f"{self._prefix}/{key}", expected, desired))


class _Line:
    """Asks a store in a thread of its own, and asks no more until it has answered, late or not."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._seconds = seconds
        # Where the answer comes to that nobody waits for any longer.
        self._late: _Answers | None = None
        self._calls: _Calls = SimpleQueue()
        Thread(target=_serve, args=(store, self._calls), name="vescale-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    @property
    def is_silent(self) -> bool:
        late = self._late
        return late is not None and late.empty()

    def ask(self, method: str, *arguments: Any) -> Any:
        if self.is_silent:
            raise StoreLostError("the store did not answer before")
        answers: _Answers = SimpleQueue()
        self._calls.put((method, arguments, answers))
        try:
            found, error = answers.get(timeout=self._seconds)
        except Empty:
            self._late = answers
            raise StoreLostError(f"the store has not answered for {self._seconds:g} s") from None
        if error is not None:
            raise error
        return found


def in_time(make: Callable[[], _T], seconds: float) -> _T:
    """Return what `make` does; it may raise, or not end, as where a server accepts and is silent.

    Raises:
        StoreLostError: it has not ended in time.
    """
    ends: Future[_T] = Future()
    Thread(target=_do, args=(make, ends), name="vescale-store-made", daemon=True).start()
    try:
        return ends.result(seconds)
    except TimeoutError:
        raise StoreLostError(f"the store has not answered for {seconds:g} s") from None


def _do(make: Callable[[], _T], ends: Future[_T]) -> None:
    try:
        ends.set_result(make())
    except BaseException as error:
        ends.set_exception(error)


def _serve(store: Any, calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        method, arguments, answers = call
        try:
            answers.put((getattr(store, method)(*arguments), None))
        except BaseException as error:
            answers.put((None, error))
        del call, arguments, answers  # while this waits for the next one
