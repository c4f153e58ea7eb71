"""Weighs calls that no program fits: how often to record, and what to warn the user of.

A recording takes about ten times as long as the call itself, so it has to be earned. The first
kind of call is recorded as it comes, a second one once it comes again or something was replayed,
and so is what their state settles to; after that replays pay for recordings, and only kinds of
calls that come often are worth one. Until then the function itself runs. Whatever makes calls
differ again and again is named once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable

MOST_PROGRAMS = 32
"""How many programs a captured function keeps."""

# A batch for training and one for evaluation, say.
_FREE_KINDS = 2
# Of one kind: gradients and states of optimizers that are there later, arguments that are numbers.
_FREE_OF_KIND = 16
# A recording takes as long as 9 to 14 calls that run, and a replay saves a fifth to a half of one.
_REPLAYS_FOR_ONE = 72
# For the first one; each further one takes twice as many. The first kinds may never come again.
_RUNS_FOR_ONE = 512
# A kind comes often if it makes such a part of the calls that miss, or has come so many times:
# rarer ones would drive each other out of the programs that are kept.
_OFTEN_PART, _OFTEN_COUNT = MOST_PROGRAMS, MOST_PROGRAMS
_MOST_KINDS = 1024
_NAMED_AT = 8
_MOST_REASONS = 256


class Misses:
    """The recordings of one captured function.

    Attributes:
        recordings: how many were made.
        replays: how many calls were replayed.
    """

    def __init__(self, name: str) -> None:
        self.recordings = 0
        self.replays = 0
        self._runs = 0
        self._spent = 0
        self._name = name
        self._reasons: Counter[str] = Counter()
        # By kind of call: how many missed, and how many were recorded.
        self._missed: Counter[Hashable] = Counter()
        self._total = 0
        self._recorded: Counter[Hashable] = Counter()

    def may_record(self, kind: Hashable) -> bool:
        """Whether one more recording has been earned; if not, count a call that runs.

        Args:
            kind: of the call: the layouts and shapes of its arguments.
        """
        # By counts of this rank: ranks may differ, and a replay communicates as a run does.
        if len(self._missed) >= _MOST_KINDS:
            self._missed.clear()
            self._total = 0
        self._missed[kind] += 1
        self._total += 1
        if not (self.recordings < MOST_PROGRAMS and self._is_free(kind)):
            if not self._is_earned(kind):
                self._runs += 1
                return False
            self._spent += 1
        self._recorded[kind] += 1
        return True

    def _is_free(self, kind: Hashable) -> bool:
        known = self._recorded.get(kind, 0)
        if not known:
            if len(self._recorded) >= _FREE_KINDS:
                return False
            # Lengths of batches that never come again would be recorded for nothing: a second kind
            # waits until it comes again, or something was replayed.
            came_again = self._missed[kind] > 1 or self.replays > 0
            return not self._recorded or (came_again and self._is_often(kind))
        return known < _FREE_OF_KIND

    def _is_earned(self, kind: Hashable) -> bool:
        """Whether replays, or many runs without any, pay for a recording of a kind."""
        paid = self.replays // _REPLAYS_FOR_ONE
        paid += (self._runs // _RUNS_FOR_ONE + 1).bit_length() - 1
        return self._spent < paid and self._is_often(kind)

    def _is_often(self, kind: Hashable) -> bool:
        count = self._missed[kind]
        return count * _OFTEN_PART >= self._total or count >= _OFTEN_COUNT

    def wants_reason(self) -> bool:
        """Whether it matters why a call was not replayed, which takes a while to find out."""
        return self._runs < _MOST_REASONS

    def explain(self, reason: str | None) -> None:
        """Count why a call was not replayed; warn, once, of a reason that comes often."""
        if reason is None or (reason not in self._reasons and len(self._reasons) > _MOST_REASONS):
            return
        self._reasons[reason] += 1
        if self._reasons[reason] == _NAMED_AT:
            warnings.warn(
                f"capture: {self._name} was called {_NAMED_AT} times with another value of "
                f"{reason}, and values are recorded anew, up to a bound from which on it runs "
                "eagerly. Make it a tensor, or keep what changes out of the captured function",
                stacklevel=2,
            )
