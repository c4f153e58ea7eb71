"""Agreement between ranks: each sends bytes to all the others, and a failure is a message, too."""

import json
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from vescale_ckpt._coordination.meeting import Call
from vescale_ckpt._errors import (
    CheckpointError,
    as_checkpoint_error,
    error_of_kind,
    listed,
)

_T = TypeVar("_T")


class Coordinator(Protocol):
    """The ranks that save or load together."""

    rank: int
    world_size: int

    def exchange(self, message: bytes) -> list[bytes]:
        """Give every rank's message to every rank, in rank order. Called by all, or none."""
        ...

    def meet(self, call: Call) -> Callable[[], None]:
        """Tell the other ranks that this one makes `call`; what is returned waits for all of them.

        The first thing in every collective call of a user: see `meeting`.
        """
        ...

    def refuse(self, call: Call, error: Exception) -> None:
        """Tell the other ranks that this one failed before it could `meet` them."""
        ...

    def background(self) -> "Coordinator":
        """Return the same ranks, for another thread. Called by all, or none."""
        ...


class SingleProcess:
    """A process that saves or loads alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._process = os.getpid()

    def exchange(self, message: bytes) -> list[bytes]:
        """Return its own message."""
        return [message]

    def meet(self, call: Call) -> Callable[[], None]:
        """Return a wait that ends at once: there is no other rank."""
        return nothing

    def refuse(self, call: Call, error: Exception) -> None:
        """Do nothing: there is no other rank."""

    def background(self) -> Coordinator:
        """Return itself, which any thread may use."""
        return self

    def __eq__(self, other: object) -> bool:
        """Compare the processes: a fork is another one than its parent."""
        return isinstance(other, SingleProcess) and self._process == other._process

    __hash__ = None  # type: ignore[assignment]


def nothing() -> None:
    """Return at once: the wait of a rank that has no others to meet."""


def meet_after(coordinator: Coordinator, call: Call, prepare: Callable[[], _T]) -> _T:
    """Run `prepare` on this rank, and then wait until all ranks have come to `call`.

    If it raises, the other ranks are told: they raise at once, and do not wait for this one.
    """
    # `prepare` may fail on this rank alone (a path that it cannot resolve), and the others wait in
    # the store. So it runs before this rank announces itself, and its failure is announced instead.
    prepared = report_if_it_fails(coordinator, call, prepare)
    coordinator.meet(call)()
    return prepared


def report_if_it_fails(coordinator: Coordinator, call: Call, prepare: Callable[[], _T]) -> _T:
    """Run `prepare` on this rank; if it raises, report it to the ranks that wait."""
    try:
        return prepare()
    except Exception as error:
        # Not on a BaseException: an interrupted rank is named by those who wait for it, after a
        # while.
        coordinator.refuse(call, error)
        raise


def all_or_none(coordinator: Coordinator, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank; every rank gets the results of all, or every rank raises.

    The result of `work` must be JSON. If it raises on some rank, all raise an error of that
    rank's kind, with its words.
    """
    # Every rank reaches the exchange, whatever happened: if one raised before it, the others would
    # wait for ever, or match its next collective with this one.
    failure: Exception | None = None
    answer: dict[str, Any]
    try:
        answer = {"done": work()}
    except Exception as error:
        failure = error
        told = as_checkpoint_error(error)
        answer = {"failed": type(told).__name__, "because": str(told)}
    # JSON and no pickle: what another rank sends is data, never code.
    answers = [json.loads(text) for text in coordinator.exchange(json.dumps(answer).encode())]
    failed = [rank for rank, other in enumerate(answers) if "failed" in other]
    if failed:
        # Decided from all answers, so all ranks raise, or none. The rank's own traceback stays
        # attached.
        raise _common_error(answers, failed) from failure
    return [other["done"] for other in answers]


def _common_error(answers: list[dict[str, str]], failed: list[int]) -> CheckpointError:
    """Build the same error on every rank: the first failing rank's, and who else failed."""
    first = answers[failed[0]]
    who = f"rank {failed[0]} of {len(answers)}: " if len(answers) > 1 else ""
    others = f" (rank(s) {listed([str(r) for r in failed[1:]])} failed, too)" if failed[1:] else ""
    return error_of_kind(first["failed"], f"{who}{first['because']}{others}")
