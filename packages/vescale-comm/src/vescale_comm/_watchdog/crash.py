"""Notes where a process crashed in C++, for the other ranks of its host to read.

gloo aborts a process whose peer sends more than it expects, as ranks that call different
collectives do; torch and a kernel may crash as well. No Python code runs then: only faulthandler
can still write a line.
"""

import contextlib
import faulthandler
import os
import re
import tempfile
import time
import weakref
from pathlib import Path

from vescale_comm._torch.call_site import is_inside_file
from vescale_comm._watchdog.places import DECORATORS

_PREFIX, _SUFFIX = "vescale-comm-", ".crash"
_OLD_SECONDS = 7 * 24 * 3600.0
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
_FATAL = re.compile(r"Fatal Python error: (.+)")


class CrashNote:
    """A file that holds the Python stacks of this process when it crashes, and else nothing."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file = -1

    def open(self) -> None:
        """Have crashes written to the file, unless somebody has them written elsewhere."""
        if faulthandler.is_enabled():
            return
        try:
            remove_old_notes()
            self._file, path = tempfile.mkstemp(_SUFFIX, _PREFIX)
        except OSError:  # no place for it: a crash is then told without its line
            return
        self.path = Path(path)
        faulthandler.enable(self._file)
        _open.add(self)

    def close(self) -> None:
        """Remove the file: the process ends, or leaves its world, as it should.

        Crashes are then written nowhere: Python does not tell whether the program has enabled
        faulthandler after `open`, which has taken the file's place. Who wants it to stay enables it
        before the first collective.
        """
        if self.path is not None:
            faulthandler.disable()
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            self.path = None
            _open.discard(self)


# Of a note: stacks of all threads.
_MOST_CHARACTERS = 1 << 22
_open: weakref.WeakSet[CrashNote] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """In a forked process: a crash of it is not one of the process whose note is open."""
    if _open:
        faulthandler.disable()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def remove_old_notes() -> None:
    """Remove what processes left that were killed: they cannot do it themselves."""
    for note in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        # Another user's, or removed by another rank of this host at the same moment.
        with contextlib.suppress(OSError):
            # A process that lives may hold it, and loses nothing but a line about its crash.
            if time.time() - note.stat().st_mtime > _OLD_SECONDS:
                note.unlink()


def crash_of(path: Path) -> str:
    """Return what a note says, in one line; empty if there is no crash in it."""
    try:
        # The path is another rank's word: no pipe is waited for, and no device read to its end.
        if not path.is_file():
            return ""
        with path.open(errors="replace") as note:
            text = note.read(_MOST_CHARACTERS)
    except OSError:
        return ""
    fatal = _FATAL.search(text)
    if fatal is None:
        return ""
    # The main thread comes last. The one that crashed is often one of the backend's own.
    frames = _FRAME.findall(text.rpartition("most recent call first")[2])
    first = next((at for at, each in enumerate(frames) if not is_inside_file(each[0])), None)
    if first is None:
        return f"{fatal[1]}, at no line of Python"
    # What the user called: the outermost function below his own, apart from decorators.
    called = [name for _, _, name in frames[:first] if name not in DECORATORS]
    op = f"in {called[-1]}, " if called else ""
    return f"{fatal[1]}, {op}at {'{}:{} in {}'.format(*frames[first])}"
