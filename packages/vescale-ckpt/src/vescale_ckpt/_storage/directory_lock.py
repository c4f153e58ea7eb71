"""Keeps a directory for the processes of one run, as long as one of them lives that holds it."""

import os
import weakref
from contextlib import suppress

from vescale_ckpt._errors import StorageError
from vescale_ckpt._storage.local import lock_directory, unlock_directory

# What this process holds, by path: several objects may, and hold it once.
_held: "weakref.WeakValueDictionary[str, Hold]" = weakref.WeakValueDictionary()
# Processes that a run has left behind may hold it for a while after it was killed.
_PATIENCE = 15.0


class Hold:
    """A lock of a directory, until this object goes, or the process and those that it forked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._process = descriptor, os.getpid()

    def __del__(self) -> None:
        with suppress(OSError):
            # Forks share the lock, as workers of a loader do: closing here leaves it with them.
            if self._process == os.getpid():
                unlock_directory(self._descriptor)
            os.close(self._descriptor)


def hold(path: str) -> Hold:
    """Keep other processes from holding a local directory; one that dies releases it.

    Raises:
        StorageError: another process holds it. File systems without locks refuse nobody.
    """
    held = _held.get(path)
    if held is None:
        try:
            held = _held[path] = Hold(_locked(path))
        except StorageError as error:
            raise StorageError(
                f"another run saves into {path}: one at a time does. Choose another directory for "
                "this one, or end the other"
            ) from error
    return held


def _locked(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        lock_directory(descriptor, path, _PATIENCE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
