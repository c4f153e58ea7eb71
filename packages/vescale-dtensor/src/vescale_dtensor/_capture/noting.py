"""Watch which functions run during a recording, by `sys.setprofile`.

Of each function that runs for the first time, `Reads` takes in the names before it does. Inside of
torch functions, which have no names that matter, nothing is watched.
"""

from __future__ import annotations

import builtins
import datetime
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vescale_dtensor._capture.code_files import USER, kind_of_code
from vescale_dtensor._capture.reads import Reads
from vescale_dtensor._capture.unsupported import refused
from vescale_dtensor._errors import CaptureError

_CLOCKS = frozenset(
    {getattr(time, name) for name in ("time", "monotonic", "perf_counter", "process_time")}
    | {getattr(time, f"{n}_ns") for n in ("time", "monotonic", "perf_counter", "process_time")}
    | {datetime.datetime.now, datetime.datetime.utcnow, datetime.date.today}
)
# What all functions of `random` come down to.
_DRAWS = frozenset({"random", "getrandbits"})
_INPUTS = frozenset({builtins.input, builtins.open, os.urandom})


def can_watch() -> bool:
    """Whether this thread has no other profiler, which watching would displace."""
    return sys.getprofile() is None


class Watch:
    """Calls `Reads.runs` before any function runs for the first time.

    Attributes:
        failure: the first refusal.
    """

    def __init__(self, reads: Reads, unguarded: frozenset[str]) -> None:
        self._reads = reads
        self._unguarded = unguarded
        self.failure: CaptureError | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the block, in this thread."""
        # Of this thread only: ranks of a simulation are threads that record at the same time.
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing in the block."""
        before = sys.getprofile()  # None in a call inside of another torch function
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        """Called by Python at each call and return in this thread."""
        # Comes before the first instruction of a function, so before it can write anything.
        # Resuming a generator is such an event, too.
        if event == "call":
            code = frame.f_code
            # Only the first time: what is met later is followed by all names so far, see `Reads`.
            if not self._reads.has_run(code):
                self._reads.runs(code, frame.f_globals)
        # Kept, not raised: an exception in here would switch off the watching, and code of the
        # user's might catch it. `Recorder.finish` raises it.
        elif event == "c_call" and self.failure is None:
            self._check_builtin(frame, argument)

    def _check_builtin(self, frame: FrameType, function: Any) -> None:
        """Note a refusal where user code asks a clock, a generator or the outside world."""
        owner = getattr(function, "__self__", None)
        # Not getstate and setstate, which a simulation calls where it goes on with another rank.
        # By object and not by function: `random.random` is a bound method of a hidden generator.
        drawn = isinstance(owner, random.Random) and function.__name__ in _DRAWS
        drawn = drawn or _is_numpys(type(owner))
        if not (drawn or function in _CLOCKS or function in _INPUTS):
            return
        file = frame.f_code.co_filename
        # Libraries read clocks to measure themselves. But `random.choice` is Python code that draws
        # for whoever calls it, so draws from that file count.
        users = kind_of_code(frame.f_code) == USER or (drawn and file == random.__file__)
        if users and function.__name__ not in self._unguarded:
            self.failure = refused(
                f"{function.__qualname__} gives another value each time, where a replay would go "
                "on with the old one. Call it outside and pass what it gives as a tensor; or pass "
                f"unguarded=[{function.__name__!r}] to capture, if no result depends on it"
            )


def _is_numpys(cls: type) -> bool:
    """Whether a class is a random generator of numpy."""
    return cls.__module__.startswith("numpy.random")
