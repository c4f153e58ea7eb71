"""Logs what this rank executes together with others, so that divergence is noticed.

Every collective of a group is recorded here before it is launched, and what other packages record:
each event adds to a digest that is equal on all ranks as long as they execute the same. Recording
communicates nothing; `comparison` compares the digests, beside the program.
"""

import sys
from collections import deque
from collections.abc import Hashable
from hashlib import blake2b
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple, Protocol, cast

from vescale_comm._errors import CommMismatchError
from vescale_comm._watchdog.places import is_users

# Events that are kept to name the first difference.
WINDOW = 256
# What is noted between events and kept for the same, and how much of it is told of one event.
_NOTES, _MOST_TOLD = 2048, 40
# Further back only every such event: for ranks of which one has got far ahead.
_STRIDE, _FURTHER = 64, 64
# What follows what is known from before. Forgotten all at once, on every rank at the same event,
# since all have met the same.
_MOST_VALUES = 8192
# How many depths of the user's line are known for one event.
_MOST_DEPTHS = 6
# How many values that were never met before are compared at once; and after how many events one
# more is. Counted and not timed: every rank has to decide alike.
_FIRST_CHECKS, _EVENTS_PER_CHECK = 1024, 256
# Steps in which more is looked at than always can be: the first ones, and one of every so many. An
# odd number, so that where several backwards make one step of an optimizer each of them has its
# turn. Without a backward a step ends after so many events.
_FIRST_STEPS, _STEPS, _MOST_EVENTS = 8, 31, 1024
# How long ranks wait for what others may say, and once one of them has not said it.
_SAY_SECONDS, _SOON = 1.0, 0.02


class Event(NamedTuple):
    """One event of a log.

    Attributes:
        number: of the event, from 1.
        digest: of all events up to this one.
        value: of this event alone.
        what: what it was, in words.
        code: function of the user's line that led here; None in threads without one.
        at: the instruction in it.
    """

    number: int
    digest: int
    value: int
    what: Hashable
    code: CodeType | None
    at: int

    @property
    def site(self) -> str:
        """The user's line."""
        if self.code is None:
            return "in a backward"
        found = next(islice(self.code.co_positions(), self.at // 2, None), (None,))
        return f"at {self.code.co_filename}:{found[0]} in {self.code.co_name}"


class LogComparison(Protocol):
    """What compares the logs of one world."""

    @property
    def trouble(self) -> str | None:
        """How the ranks differ, once that is known."""

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""

    def error(self) -> CommMismatchError:
        """Return `trouble` as an error that is about to be raised."""

    def meet(self, log: "ExecutionLog", count: int, value: int) -> None:
        """Wait until the others are at this event, and compare its value."""

    def agree(self, log: "ExecutionLog", word: str, seconds: float) -> bool:
        """Whether every rank of the log says this word, the last within so many seconds."""


class ExecutionLog:
    """The events of one list of ranks.

    Args:
        ranks: global ranks that all execute what is recorded here, in the same order.
        name: tells logs of the same ranks apart.
        comparison: who compares it.

    Attributes:
        samples: whether more is looked at now than always can be, such as what is computed between
            events: in the first eight steps, and in one of 31 (see `end_step`). By events, and not
            by calls, which a rank may make alone: so it is the same on every rank at one point of
            the program.
    """

    def __init__(self, ranks: tuple[int, ...], name: str, comparison: LogComparison) -> None:
        self.ranks, self.name = ranks, name
        self.key = f"{token((ranks, name)):x}"
        self._comparison = comparison
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.count = self._digest = self._value = self._steps = 0
        self._step_ends = _MOST_EVENTS
        self.samples: bool = self._comparison.enabled
        self._credit = float(_FIRST_CHECKS)
        self._patient = True
        # Where the user's line was found, by what followed what.
        self._depths: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[str, int] = {}
        # Of this log alone: what is equal and no equal text (1, 1.0 and True) has the number of the
        # one that was met first, and in a log every rank meets the same.
        self._tokens: dict[Hashable, int] = {}
        # The fields of an `Event` each.
        self._window: deque[tuple[int, int, int, Hashable, CodeType | None, int]]
        self._window = deque(maxlen=WINDOW)
        self._further: deque[tuple[int, int]] = deque(maxlen=_FURTHER)
        self._notes: deque[tuple[int, Hashable]] = deque(maxlen=_NOTES)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded and compared."""
        return self._comparison.enabled

    @property
    def digest(self) -> int:
        """Of all events so far."""
        return self._digest

    def record(self, what: Hashable, detail: int = 0, *, together: bool = False) -> None:
        """Add an event, which all ranks of the log add at the same point of the program.

        Args:
            what: what it is, for messages as well: equal on every rank, and equal as text. It is
                kept for as long as the process lives, so it refers to no tensor, mesh or group.
            detail: more that is equal on every rank.
            together: whether every rank comes here, whatever this one does from here on. What was
                never met before, or not after the event before it, is compared before it goes on.

        Raises:
            CommMismatchError: the ranks have executed different things, here or before.
        """
        comparison = self._comparison
        if not comparison.enabled:
            self.samples = False
            return
        if comparison.trouble is not None:
            raise comparison.error()
        known = self._tokens.get(what)
        value = hash((self._token(what) if known is None else known, detail))
        # In a steady program events follow each other as they did before, so that one which was
        # left out is something new, like one that was never met.
        following = hash((self._value, value))
        self._value = value
        depths = self._depths.get(following)
        code, at, depth = _users_place(() if depths is None else depths)
        self.count = count = self.count + 1
        if count >= self._step_ends:
            self.end_step()
        self._digest = digest = hash((self._digest, value))
        # A plain tuple, for which no code runs.
        self._window.append((count, digest, value, what, code, at))
        if not count % _STRIDE:
            self._further.append((count, digest))
        if depths is None:
            if len(self._depths) >= _MOST_VALUES:
                self._depths.clear()
            self._depths[following] = (depth,)
            self._check_new(count, value, together)
        elif depth not in depths and len(depths) < _MOST_DEPTHS:
            # Alike collectives come from a forward and from a backward, and a program that was
            # recorded comes here by fewer calls. The innermost is asked first.
            self._depths[following] = tuple(sorted((*depths, depth)))

    def end_step(self) -> None:
        """Note that a step of the program ends, at the same point on every rank: see `samples`."""
        self._steps += 1
        self._step_ends = self.count + _MOST_EVENTS
        sampled = self._steps < _FIRST_STEPS or not self._steps % _STEPS
        self.samples = sampled and self._comparison.enabled

    def note(self, value: int, what: Hashable) -> None:
        """Add a number that is equal on every rank, and changes too often to be an event.

        It is part of the digest of the next event. A rank that passes another one is named within
        seconds, and not before it goes on.

        Args:
            value: equal on every rank: no hash of text, which every process has its own of.
            what: what it belongs to, for messages; None where events say that.
        """
        if self._comparison.enabled:
            self._digest = hash((self._digest, value))
            if what is not None:
                self._notes.append((self.count + 1, what))

    def say(self, what: str) -> None:
        """Remember what leads to the next event, for messages alone: ranks may differ in it."""
        self._notes.append((self.count + 1, what))

    def notes(self) -> dict[int, list[str]]:
        """Return the last that was noted and said, by the number of the event that followed."""
        found: dict[int, deque[str]] = {}
        for number, what in list(self._notes):
            found.setdefault(number, deque(maxlen=_MOST_TOLD)).append(str(what))
        return {number: list(said) for number, said in found.items()}

    def _check_new(self, count: int, value: int, together: bool) -> None:
        earned = count // _EVENTS_PER_CHECK
        if together and self._credit + earned >= 1:
            self._credit -= 1
            self._comparison.meet(self, count, value)

    def all_say(self, word: str) -> bool:
        """Return whether every rank of the log says a word: the same answer on each that asks.

        Not collective: who never asks is waited for, a second the first time and no longer, and
        then the answer is no. A word is said once.
        """
        if not self._comparison.enabled or self._comparison.trouble is not None:
            return False
        agreed = self._comparison.agree(self, word, _SAY_SECONDS if self._patient else _SOON)
        self._patient = agreed
        return agreed

    def _token(self, what: Hashable) -> int:
        if len(self._tokens) >= _MOST_VALUES:
            self._tokens.clear()
        found = self._tokens[what] = token(what)
        return found

    def is_sample(self, kind: str) -> bool:
        """Return whether this is the 1st, 2nd, 4th, … or the 64th, 128th, … of this kind."""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return not number & (number - 1) or not number % _STRIDE

    def events(self) -> list[Event]:
        """Return the last events."""
        return list(map(Event._make, list(self._window)))

    def digests(self) -> dict[int, int]:
        """Return digests by the number of the last event that they hold."""
        # Copied before they are looked at: another thread may be recording.
        further, window = list(self._further), list(self._window)
        return dict(further) | {event[0]: event[1] for event in window[-_STRIDE:]}


class WorldLogs(Protocol):
    """The logs of a world that compares them itself, as a simulation does."""

    def log(self, ranks: tuple[int, ...], name: str) -> ExecutionLog:
        """Return the log of these ranks by that name."""

    def forget(self) -> None:
        """Begin anew."""

    def enable(self, compare: bool) -> None:
        """Compare from here on, or nothing more."""


class WatchedGroup:
    """Base of process groups whose world compares its logs itself.

    Attributes:
        logs: of its world.
    """

    __slots__ = ()

    logs: WorldLogs


# Functions that the user wrote, and others, so that a stack is walked quickly.
_users: dict[CodeType, bool] = {}


def token(what: Hashable) -> int:
    """Return a number for what is equal as text: the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=7).digest(), "little")


def _users_place(depths: tuple[int, ...]) -> tuple[CodeType | None, int, int]:
    """Return the innermost function that the user wrote, the instruction in it, and how deep it is.

    Looked for where it was before: walking a stack costs more than all else here.
    """
    try:
        for depth in depths:
            frame = sys._getframe(depth)
            # `_is_users` written out, of code that has been met.
            if _users.get(frame.f_code):
                return frame.f_code, frame.f_lasti, depth
    except (ValueError, TypeError):  # the stack is not so deep today; code without a hash
        pass
    depth, found = 2, cast(FrameType | None, sys._getframe(2))
    while found is not None:
        if _is_users(found):
            return found.f_code, found.f_lasti, depth
        found, depth = found.f_back, depth + 1
    return None, 0, 2


def _is_users(frame: FrameType) -> bool:
    try:
        known = _users.get(frame.f_code)
    except TypeError:
        # Code that torch.compile made may hold a dict among its constants, and then has no hash.
        # What called it is the user's as well.
        return False
    if known is None:
        if len(_users) >= _MOST_VALUES:
            _users.clear()
        known = _users[frame.f_code] = is_users(frame)
    return known
