"""Ranks meet before the first collective of a call; who does not come is named in bounded time.

A collective that some ranks never join waits as long as the group allows, and, worse, is matched
with whatever collective those ranks run next. So every rank first writes to the store of the group
which call it makes, and continues when all have done so.

The meetings of a group are numbered. A rank joins the one that is open, and a counter tells how
many ranks have come. When all have, by the same call, the meeting ends with "go"; or a rank that
has waited too long ends it with an error message, which all who wait raise. An end is decided by
one atomic write, so no two ranks see different ones.
"""

import json
import logging
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from inspect import currentframe
from typing import Any, NamedTuple, Protocol

from vescale_ckpt._errors import CoordinationError, listed

LONGEST_DEFAULT = 600.0
# Seconds after which those who wait log whom they wait for.
NOTICE_SECONDS = 30.0
_GO = "go"
# Seconds between two looks at the store, growing: most meetings are over at once.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.1
# One counter, so that one atomic addition tells both: how many ranks came (the high bits), and the
# sum of the hashes of what they call (the low ones).
_COUNT_BIT = 46
_KIND_MASK = (1 << 28) - 1
# Missing ranks whose last calls are told in a message, at most.
_TOLD = 4

# The number of a meeting, and the name, subject and line of the call.
_Place = list[Any]

_log = logging.getLogger("vescale_ckpt")


class Store(Protocol):
    """What is asked of a torch.distributed.Store."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for it where there is none yet."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have a value."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is as expected ("": not there); returns the value of now."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a value."""
        ...


class Call(NamedTuple):
    """A collective call: its name, what it is about, the line that makes it, and its patience."""

    name: str
    subject: str
    line: str
    # None: as long as the store itself waits.
    timeout: float | None = None

    def __str__(self) -> str:
        return f"{self.name}({self.subject}) at {self.line}"


def call_of(name: str, subject: object, timeout: float | None) -> Call:
    """Describe the call that is being made: by the first line outside of this package."""
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    # The line of the user's code: that is what tells two calls of one name apart in a message.
    frame = currentframe()
    package = __name__.partition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    line = (
        f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"
    )
    return Call(name, repr(subject)[:500], line, timeout)


def arrive(store: Store, rank: int, world_size: int, call: Call) -> Callable[[], None]:
    """Tell the other ranks that this one makes `call`. What is returned waits for all of them.

    Raises:
        CoordinationError: From the wait, on every rank that waits: some rank did not come in time,
            makes another call, or failed before it came.
    """
    meeting = _join(store, rank, world_size, call, late=True)
    # Exactly one rank gets the full count from its addition, so exactly one ends the meeting here.
    if meeting.came_last(store.add(f"{meeting.number}/came", _ticket(call))):
        meeting.end(_GO if meeting.calls_agree() else meeting.words_of_difference())
        meeting.forget_the_one_before()
    # Not waited for yet: the caller may work meanwhile, as `async_save` copies.
    return meeting.wait


def refuse(store: Store, rank: int, world_size: int, call: Call, error: Exception) -> None:
    """Tell the other ranks that this one failed before `call`: none of them needs to wait."""
    # `late=False`: this rank is about to raise its own error, and must not raise another one here.
    meeting = _join(store, rank, world_size, call, late=False)
    words = f"{type(error).__name__}: {error}"
    # A rank that comes later gets this answer for any call: what this rank could not process may be
    # just what it passes other than they do.
    meeting.end(
        f"rank {rank} of {world_size} failed on its way into {call}: {words}", any_subject=True
    )


def _ticket(call: Call) -> int:
    return (1 << _COUNT_BIT) + (zlib.crc32(call.name.encode()) & _KIND_MASK)


def _join(store: Store, rank: int, world_size: int, call: Call, *, late: bool) -> "_Meeting":
    # The number of ended meetings is the number of the next one. But a rank may come before the end
    # of its last one is counted, so it also counts its own: it never joins a number twice.
    following = store.add(f"following/{rank}", 0)
    number = max(store.add("ended", 0), following)
    meeting = _Meeting(store, rank, world_size, call, number)
    if late and number > following:
        # The others have ended meetings without this rank. It is told so once, and then joins them.
        store.add(f"following/{rank}", number - following)
        meeting.raise_if_too_late()
        following = number
    store.add(f"following/{rank}", number + 1 - following)
    # Before the counter is raised: when all have come, all of these can be read.
    store.set(f"at/{rank}", json.dumps([number, call.name, call.subject, call.line]))
    return meeting


@dataclass(frozen=True)
class _Meeting:
    """One meeting, as one rank sees it."""

    store: Store
    rank: int
    world_size: int
    call: Call
    number: int

    def came_last(self, came: int) -> bool:
        """Return whether, by the counter of this meeting, all ranks are here now."""
        return came >> _COUNT_BIT == self.world_size

    def calls_agree(self) -> bool:
        """Return whether all ranks make the same call, once all of them are here."""
        # The sum equals that of `world_size` times this rank's call only if all hashes agree (or
        # differ in ways that cancel out, which nobody makes by mistake).
        came = self.store.add(f"{self.number}/came", 0)
        return came == self.world_size * _ticket(self.call)

    def end(self, words: str, *, any_subject: bool = False) -> str:
        """End the meeting with "go" or with words, unless another rank has; returns the end."""
        # The one atomic decision: the first to write the end wins, and all others get what it
        # wrote.
        decided = self.store.compare_set(f"{self.number}/end", "", words).decode()
        # Only the winner counts the end. An error message names its rank, and "go" comes only from
        # the last to arrive, so no other rank can have written the same words.
        if decided == words:
            subject = None if any_subject else self.call.subject
            note = [self.number, self.call.name, subject, self.rank, words]
            # Before the count: a rank that finds the meeting ended can read why.
            self.store.set("last end", json.dumps(note))
            self.store.add("ended", 1)
        return decided

    def forget_the_one_before(self) -> None:
        """Remove what the last meeting has left: all ranks are here, so all have read its end."""
        for key in ("came", "end", "notice"):
            # Not every store can remove keys, and some raise.
            with suppress(RuntimeError):
                self.store.delete_key(f"{self.number - 1}/{key}")

    def wait(self) -> None:
        """Wait until the meeting ends; say who is missing after a while, and end it after all."""
        try:
            end = self._ended()
        except BaseException:
            # Interrupted: without an end, the others would go on into a collective without this
            # rank.
            end = self.end(f"rank {self.rank} of {self.world_size} was interrupted in {self.call}")
            # Too late to withdraw: the others are on their way.
            if end == _GO:
                _log.error("rank %d leaves the others alone in %s", self.rank, self.call)
            raise
        if end != _GO:
            raise CoordinationError(end)

    @property
    def patience(self) -> float:
        """Seconds to wait: those asked for, else those of the process group."""
        if self.call.timeout is not None:
            return self.call.timeout
        # Where torch does not tell that of the group: that of the store which torch made for it.
        own: timedelta | None = getattr(self.store, "timeout", None)
        return LONGEST_DEFAULT if own is None else min(own.total_seconds(), LONGEST_DEFAULT)

    def _ended(self) -> str:
        patience = self.patience
        began, pause, noticed = time.monotonic(), _FIRST_PAUSE, False
        key = f"{self.number}/end"
        # Polled: a blocking wait on the store would keep every other thread of this process from
        # it.
        while not self.store.check([key]):
            waited = time.monotonic() - began
            if waited > patience:
                # Unless somebody else has ended it in the meantime: then that is what counts.
                return self.end(self.words_of_missing(waited))
            if waited > NOTICE_SECONDS and not noticed:
                noticed = True
                self._notice(waited)
            time.sleep(min(pause, max(0.0, patience - waited)))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return self.store.get(key).decode()

    def _notice(self, waited: float) -> None:
        key = f"{self.number}/notice"
        # One rank finds out who is missing, and all that wait log what it found: looking costs a
        # read per rank.
        if not self.store.check([key]):
            self.store.compare_set(key, "", self.words_of_missing(waited))
        _log.warning("%s", self.store.get(key).decode())

    def words_of_missing(self, waited: float) -> str:
        """Say who has not come, and what those did last."""
        places = {rank: self._place_of(rank) for rank in range(self.world_size)}
        here = [rank for rank, place in places.items() if place and place[0] == self.number]
        missing = [rank for rank in places if rank not in here]
        last = "; ".join(f"rank {rank}: {_described(places[rank])}" for rank in missing[:_TOLD])
        return (
            f"{self.call}: rank(s) {listed(list(map(str, here)))} of {self.world_size} have waited "
            f"{waited:.0f} s for rank(s) {listed(list(map(str, missing)))}, which have not called "
            f"it. What those called last: {last}. It is a collective call: make it on every rank "
            "of the group, or pass as `group` the ranks that make it"
        )

    def words_of_difference(self) -> str:
        """Say which rank makes which call, where they are not the same."""
        calls: dict[str, list[str]] = {}
        for rank in range(self.world_size):
            calls.setdefault(_described(self._place_of(rank)), []).append(str(rank))
        told = "; ".join(f"rank(s) {listed(ranks)}: {what}" for what, ranks in calls.items())
        return f"the ranks make different calls, which would wait for each other for ever: {told}"

    def raise_if_too_late(self) -> None:
        """Raise what the others have, if they gave up waiting for just this call of this rank."""
        if not self.store.check(["last end"]):
            return
        number, name, subject, rank, words = json.loads(self.store.get("last end"))
        # If the rank that gave up has gone on to something else, its error is handled there, and
        # this call is the first of a new attempt.
        place = self._place_of(rank)
        moved_on = place is None or place[0] != number
        same = name == self.call.name and subject in (None, self.call.subject)
        if words != _GO and same and not moved_on:
            raise CoordinationError(f"rank {self.rank} came too late: {words}")

    def _place_of(self, rank: int) -> _Place | None:
        """Return the number of the last meeting of a rank, and its call there."""
        key = f"at/{rank}"
        # Asked first: `get` waits for a key that is not there.
        place: _Place | None = json.loads(self.store.get(key)) if self.store.check([key]) else None
        return place


def _described(place: _Place | None) -> str:
    return "nothing yet" if place is None else f"{place[1]}({place[2]}) at {place[3]}"
