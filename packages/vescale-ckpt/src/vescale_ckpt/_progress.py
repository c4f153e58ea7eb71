"""Progress reports: to a callback, which may print a line on the terminal."""

import sys
import threading
import time
from collections.abc import Callable

# Called with (bytes done, bytes to do) of this rank.
Progress = Callable[[int, int], None]

# Seconds before the first line, so that what is quick prints nothing, and between two.
_QUIET_SECONDS = 1.0
_EVERY_SECONDS = 0.2


class ByteCounter:
    """Adds up the bytes of several threads, and tells each sum."""

    def __init__(self, total: int, tell: Progress) -> None:
        self.total, self._tell = total, tell
        self._done, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count so many bytes more as done."""
        # The callback, too, under the lock: callbacks are the user's and need not be thread-safe.
        with self._lock:
            self._done += nbytes
            self._tell(self._done, self.total)


def progress_line(what: str) -> Progress:
    """Return a callback that shows a line on stderr, on a terminal and after a second.

    What reads or writes for long takes it as its `progress`. Of many ranks, one should show it.

    Args:
        what: How the line begins.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path, line = tempfile.mkdtemp() + "/step-1", vescale_ckpt.progress_line("saving")
        >>> vescale_ckpt.save(path, {"weight": torch.ones(2)}, progress=line)
    """
    if not sys.stderr.isatty():
        return silent
    started = time.monotonic()
    shown = started + _QUIET_SECONDS - _EVERY_SECONDS

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _EVERY_SECONDS and (done < total or shown < started + _QUIET_SECONDS):
            return
        shown = now
        rate = done / (now - started) / 1e6
        end = "\n" if done >= total else ""
        share = 100 * done // max(total, 1)
        print(
            f"\r{what}: {share:3d} %  {done / 1e6:.0f} MB  {rate:.0f} MB/s",
            end=end,
            file=sys.stderr,
        )

    return show


def silent(done: int, total: int) -> None:
    """Show nothing."""
