"""The local file system, or one that is mounted."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vescale_ckpt._errors import CorruptError, StorageError
from vescale_ckpt._storage.base import Reader, Writer
from vescale_ckpt._storage.writeback import begin_writeback
from vescale_ckpt._untrusted import open_regular

# A commit takes milliseconds, and a second if old data is removed.
_LOCK_SECONDS = 60.0
_LOCK_POLL_SECONDS = 0.01
# The disk begins with this much of a file while more of it is written.
_WRITEBACK_BYTES = 4 << 20


class LocalStorage:
    """The local (or a mounted) file system."""

    renames = True

    def make_directory(self, path: str) -> None:
        """Make a directory; one that exists already is fine."""
        with _storage_errors("make directory", path):
            os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> Writer:
        """Begin a file that must not exist yet."""
        return _LocalWriter(path)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file that must not exist yet, durably."""
        writer = self.create(path)
        try:
            writer.write(memoryview(content))
            writer.finish()
        finally:
            writer.abandon()

    def open(self, path: str) -> Reader:
        """Open a file for reading."""
        return _LocalReader(path)

    def rename(self, source: str, target: str) -> None:
        """Move atomically: over an existing file, or an empty directory, or nothing."""
        with _storage_errors(f"rename {source} to", target):
            os.rename(source, target)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        with _storage_errors("sync directory", path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                # A file's own fsync does not make its name durable, nor does a rename: the
                # directory holds both.
                os.fsync(descriptor)
            except OSError as error:
                # Some network file systems cannot sync a directory, and say so like this.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
            finally:
                os.close(descriptor)

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Keep other writers out of a directory; a writer that dies releases it."""
        with _storage_errors("lock", path):
            descriptor = os.open(path, os.O_RDONLY)
        try:
            # On the directory itself, so no lock file is left behind; closing it, also by dying,
            # unlocks.
            lock_directory(descriptor, path)
            yield
        finally:
            os.close(descriptor)

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        with _storage_errors("remove", path):
            os.remove(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        with _storage_errors("remove directory", path):
            os.rmdir(path)

    def is_directory(self, path: str) -> bool:
        """Return whether a directory is there; a symbolic link to one is not, nor entered."""
        return os.path.isdir(path) and not os.path.islink(path)

    def exists(self, path: str) -> bool:
        """Return whether anything is there."""
        return os.path.lexists(path)

    def size(self, path: str) -> int:
        """Return the number of bytes in a file."""
        with _storage_errors("look at", path):
            return os.stat(path).st_size

    def names_in(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        with _storage_errors("list", path):
            return sorted(os.listdir(path))


class _LocalWriter:
    def __init__(self, path: str) -> None:
        self.path = path
        with _storage_errors("create", path):
            # Unbuffered: the data is in memory already. "x": a name is never written twice.
            self.file = open(path, "xb", buffering=0)  # noqa: SIM115 closed by finish or abandon
        # How much is written, and how much of it the disk was told to begin with.
        self.written = self.begun = 0

    def write(self, data: memoryview) -> None:
        with _storage_errors("write", self.path):
            # Unbuffered, so a write may be shorter than its data.
            while data.nbytes:
                count = self.file.write(data)
                data = data[count:]
                self.written += count
        if self.written - self.begun >= _WRITEBACK_BYTES:
            begin_writeback(self.file.fileno(), self.begun, self.written - self.begun)
            self.begun = self.written

    def finish(self) -> None:
        with _storage_errors("sync", self.path):
            # Before COMMIT may name this file, on any rank: see `commit`.
            os.fsync(self.file.fileno())
            # Some network file systems report a full disk only here.
            self.file.close()

    def abandon(self) -> None:
        self.file.close()


class _LocalReader:
    def __init__(self, path: str) -> None:
        self.path = path
        with _storage_errors("open", path):
            try:
                self.file = open_regular(path)
            except ValueError as error:
                raise CorruptError(str(error)) from None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with _storage_errors("read", self.path):
            while buffer.nbytes:
                # At an offset, without a position that threads would share; it may return less than
                # asked.
                count = os.preadv(self.file.fileno(), [buffer], offset)
                if not count:
                    raise CorruptError(
                        f"{self.path} ends {buffer.nbytes} bytes before the end of the range that "
                        f"starts at byte {offset}: it was truncated"
                    )
                buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        self.file.close()


def lock_directory(descriptor: int, path: str, seconds: float = _LOCK_SECONDS) -> None:
    """Lock a directory that is open, until it is closed; wait for another one to be done."""
    # Not on every system; where it is not there, or a network file system has no locks, one
    # writer at a time is what the caller has to see to.
    try:
        import fcntl
    except ImportError:
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"another save has been committing to {path} for {seconds:.0f} s"
                ) from None
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL):
                raise
            return


def unlock_directory(descriptor: int) -> None:
    """Release a lock, also where another process has the same open file."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def _storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn an `OSError` into one that says what was tried, and where."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown error")
        raise StorageError(f"cannot {action} {path}: {error.strerror} ({code})") from error
