"""A line on the terminal for what takes long; silent everywhere else."""

import sys
import time
from collections.abc import Callable

# Called with (bytes done, bytes to do) of this rank.
Progress = Callable[[int, int], None]

_QUIET_SECONDS = 1.0
_EVERY_SECONDS = 0.2


def terminal_line(what: str) -> Progress:
    """A progress line on stderr, if that is a terminal and the work lasts over a second."""
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
