"""Memory that the ranks of one machine share."""

import mmap
import os
from contextlib import suppress

# Value of MADV_POPULATE_READ in Linux's madvise(2), which Python does not name: the kernel maps
# many pages at a time, and they may still be written to.
_POPULATE_READ = 22


class SharedMemory:
    """Bytes that several processes of one machine see. The kernel frees them with the last one.

    It has no name on any file system, so that nothing is left behind, whoever is killed.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("vescale-ckpt", os.MFD_CLOEXEC)
        # The path by which other processes of this user can open it.
        self.name = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._opened = -1
        self._map: mmap.mmap | None = None

    def attach(self, name: str, nbytes: int) -> None:
        """Open the memory of that name; `OSError` if there is not enough, or it is out of reach."""
        self._opened = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        if name == self.name:
            # Reserved now: memory that turns out to be missing later kills the process that writes
            # to it. By its owner only: others would repeat the work, and wait for each other in the
            # kernel.
            os.posix_fallocate(self._opened, 0, nbytes)

    def view(self, nbytes: int) -> memoryview:
        """Map the bytes that all see, once all have attached."""
        self._map = mmap.mmap(self._opened, nbytes, flags=mmap.MAP_SHARED)
        # All pages at once: mapping them one by one, as they are written to, costs many times as
        # much. A hint, for Linux 5.14 and later.
        with suppress(OSError):
            self._map.madvise(_POPULATE_READ)
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap and release it."""
        if self._map is not None:
            # After an error the traceback still holds views of it; the memory goes when they do.
            with suppress(BufferError):
                self._map.close()
        for descriptor in (self._opened, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)


def shared_memory() -> SharedMemory | None:
    """Make memory to share, of no size yet; None where the system has none."""
    try:
        return SharedMemory()
    except (AttributeError, OSError):
        return None
