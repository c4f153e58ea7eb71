"""Let the disk begin while a file is still being written, instead of when it is synced."""

import ctypes
import functools
import sys
from collections.abc import Callable

# Value of SYNC_FILE_RANGE_WRITE in Linux's sync_file_range(2): begin to write dirty pages, and do
# not wait.
_WRITE = 2


def begin_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Ask the system to begin writing a range of a file to the disk. A hint: nothing is certain.

    What goes wrong then is reported by the fsync that follows, as without the hint.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, nbytes, _WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Find the function of the C library, where there is such; Python's `os` has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
