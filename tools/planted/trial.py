"""One run of pytest on copied sources: bounded in time, with all that it started ended after it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.packages import ROOT
from tools.planted.sources import Sources

BOUND = 420.0  # seconds for all tests of a fault
# A test that says nothing for so long hangs; what is only slow has run out of time instead.
SILENT = 120.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
_BEGUN = re.compile(r"^(\S+\.py::.+?) *$", re.MULTILINE)
# pytest's exit codes: https://docs.pytest.org/en/stable/reference/exit-codes.html
PASSED, FAILED, INTERRUPTED, NOTHING = 0, 1, 2, 5


@dataclass(frozen=True)
class Trial:
    """What became of one run of tests."""

    outcome: str  # "passed", "failed", "hung", "crashed", "out of time" or "no tests"
    by: str  # the test that failed or hung first, or what ran in vain
    why: str  # its last words
    seconds: float

    @property
    def found(self) -> bool:
        """Whether there was something to notice, and it was noticed."""
        return self.outcome in ("failed", "hung", "crashed")


def run(sources: Sources, tests: list[str], bound: float, marker: str | None = None) -> Trial:
    """Run tests, named from the checkout, up to the first that fails.

    `marker` is pytest's `-m`; without it, the tests run that run on a change.

    Raises:
        RuntimeError: pytest could not run them.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *tests]
    command += [] if marker is None else ["-m", marker]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output.txt")
        status = _bounded(command, sources, output, bound)
        seconds = time.monotonic() - begun
        text = output.read_text(encoding="utf-8", errors="replace")
        silent = time.time() - output.stat().st_mtime
    return _trial(status, text, " ".join(tests), silent, seconds)


def _bounded(command: list[str], sources: Sources, output: Path, bound: float) -> int | None:
    """Return the exit status, or None if it had to be ended."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=sources.env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(bound)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what it left behind: workers whose test failed may wait for one another.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _trial(status: int | None, text: str, tests: str, silent: float, seconds: float) -> Trial:
    """Read what pytest printed."""
    failed, running = _FAILED.search(text), _BEGUN.findall(text)
    last = running[-1] if running else tests
    if status is None:
        outcome = "hung" if silent > SILENT else "out of time"
        return Trial(outcome, last, f"no word for {silent:.0f} s", seconds)
    if failed and status in (FAILED, INTERRUPTED):
        return Trial("failed", failed[1], failed[2] or "", seconds)
    if status < 0:
        return Trial("crashed", last, f"signal {-status}", seconds)
    if status not in (PASSED, NOTHING):
        raise RuntimeError(f"pytest ended with {status} on {tests}:\n{text[-3000:]}")
    return Trial("passed" if status == PASSED else "no tests", tests, "", seconds)
