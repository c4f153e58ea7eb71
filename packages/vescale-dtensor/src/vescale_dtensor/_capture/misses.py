"""What calls that no program stands for cost: how often to record again, and what to tell the user.

A recording takes about ten times as long as the call itself, so it has to be earned: the first
kinds of calls are recorded as they come, further ones only after enough replays of what there is.
Until then the function itself runs. Whatever makes calls differ again and again is named once.
"""

from __future__ import annotations

import warnings
from collections import Counter

MOST_PROGRAMS = 32
"""How many programs a captured function keeps, and how many it records without having replayed."""

# A recording runs about 18 times as many Python functions as a call does, a replay half as many,
# and a call that is not replayed a tenth more: so 64 replays pay for one, and for what is missed.
_REPLAYS_FOR_ONE = 64
# And so do 512 calls that ran, at a price of 4 %: state that has changed for good (gradients that
# are there after the first steps) may have left no program that is ever replayed.
_RUNS_FOR_ONE = 512
_OFTEN = 8
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
        self._name = name
        self._reasons: Counter[str] = Counter()

    def may_record(self) -> bool:
        """Whether one more recording has been earned; if not, count a call that runs."""
        # By counts of this rank: ranks may differ, and a replay communicates as a run does.
        beyond = self.recordings - MOST_PROGRAMS
        earned = self.replays // _REPLAYS_FOR_ONE + self._runs // _RUNS_FOR_ONE
        self._runs += beyond >= earned
        return beyond < earned

    def explain(self, reason: str | None) -> None:
        """Count why a call was not replayed; warn, once, of a reason that comes often."""
        if reason is None or (reason not in self._reasons and len(self._reasons) > _MOST_REASONS):
            return
        self._reasons[reason] += 1
        if self._reasons[reason] == _OFTEN:
            warnings.warn(
                f"capture: {self._name} was called {_OFTEN} times with another value of {reason}, "
                "and every value is recorded anew, up to a bound from which on it runs eagerly. "
                "Make it a tensor, or keep what changes out of the captured function",
                stacklevel=2,
            )
