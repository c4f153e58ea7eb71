"""Object stores and other remote file systems, through fsspec: an optional dependency.

Nothing is renamed there: a generation is written where it stays, and the one object that makes it
count, COMMIT, is written last and completely.
"""

import importlib
import posixpath
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from vescale_ckpt._errors import CheckpointError, CorruptError, StorageError
from vescale_ckpt._storage.base import Reader, Writer

# Protocols of stores that have no directories. Elsewhere (HDFS, SFTP, ...) they are made.
_BUCKETS = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs", "cos", "tos", "oci")
)


class FsspecStorage:
    """A file system of fsspec. Paths keep their protocol: `s3://bucket/run/step`."""

    renames = False

    def __init__(self, url: str, filesystem: Any = None) -> None:
        if filesystem is None:
            try:
                # Imported only when a remote path shows up: local checkpoints need no fsspec.
                fsspec = importlib.import_module("fsspec")
            except ImportError:
                raise StorageError(
                    f"{url}: remote paths need fsspec: pip install 'vescale-ckpt[fsspec]'"
                ) from None
            with _storage_errors("open the file system of", url):
                filesystem, _ = fsspec.core.url_to_fs(url)
        self._fs = filesystem

    def make_directory(self, path: str) -> None:
        """Do nothing on an object store: directories are parts of names there."""
        # There clients would make the bucket instead, of a misspelt name, too.
        if path.partition("://")[0] in _BUCKETS:
            return
        with _storage_errors("make directory", path):
            self._fs.makedirs(path, exist_ok=True)

    def create(self, path: str) -> Writer:
        """Begin a file that must not exist yet."""
        # Object stores cannot create exclusively in general. Names hold a random generation, so a
        # clash would be a fault of ours.
        if self.exists(path):
            raise StorageError(f"cannot create {path}: it exists")
        return _RemoteWriter(self._fs, path)

    def put(self, path: str, content: bytes) -> None:
        """Write a small file at once, over what is there: completely, or not at all."""
        with _storage_errors("put", path):
            self._fs.pipe_file(path, content)

    def open(self, path: str) -> Reader:
        """Open a file for reading."""
        return _RemoteReader(self._fs, path)

    def rename(self, source: str, target: str) -> None:
        """Refuse: a rename on an object store is a copy."""
        raise StorageError(f"cannot rename {source} to {target}: an object store has no renames")

    def sync_directory(self, path: str) -> None:
        """Do nothing: an object that was written is durable."""

    def locked(self, path: str) -> AbstractContextManager[None]:
        """Lock nothing: object stores have no lock that all of them share."""
        return nullcontext()

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        with _storage_errors("remove", path):
            self._fs.rm_file(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory, where there are such."""
        if not self.is_directory(path):
            return
        with _storage_errors("remove directory", path):
            self._fs.rmdir(path)

    def is_directory(self, path: str) -> bool:
        """Return whether a directory is there."""
        info = self._info(path)
        return info is not None and info["type"] == "directory"

    def exists(self, path: str) -> bool:
        """Return whether anything is there."""
        return self._info(path) is not None

    def size(self, path: str) -> int:
        """Return the number of bytes in a file."""
        with _storage_errors("look at", path):
            self._fs.invalidate_cache()
            return int(self._fs.size(path))

    def names_in(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        with _storage_errors("list", path):
            self._fs.invalidate_cache()
            entries = self._fs.ls(path, detail=False)
        itself = (path.partition("://")[2] or path).strip("/")
        found = [str(entry).strip("/") for entry in entries]
        # An object called like a directory, which consoles make of "new folder", lists itself.
        return sorted(posixpath.basename(one) for one in found if one != itself)

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return what is known of a name, or None where nothing is there."""
        with _storage_errors("look at", path):
            # Others write, too: what was listed before may be old.
            self._fs.invalidate_cache()
            try:
                found: dict[str, Any] = self._fs.info(path)
            # Only these: fsspec's own `exists` takes every error for an absence, so that a save
            # would replace what it could not see during an outage.
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found


class _RemoteWriter:
    def __init__(self, filesystem: Any, path: str) -> None:
        self.path = path
        with _storage_errors("create", path):
            self.file = filesystem.open(path, "wb")

    def write(self, data: memoryview) -> None:
        with _storage_errors("write", self.path):
            self.file.write(data)

    def finish(self) -> None:
        with _storage_errors("finish", self.path):
            self.file.close()

    def abandon(self) -> None:
        # Closing would complete the object. It counts for nothing, but need not be there.
        if self.file.closed:
            return
        with suppress(Exception):
            self.file.discard()  # ends an upload in parts, which would cost money for good
        try:
            # Else Python would close it, and so complete it, when the object is forgotten.
            self.file.closed = True
        except AttributeError:
            self.file.close()  # of a file system: what is written is there already


class _RemoteReader:
    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self.path = filesystem, path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with _storage_errors("read", self.path):
            # A request for each range, without a file object: those read ahead, and guess wrong
            # here.
            data = self._fs.cat_file(self.path, start=offset, end=offset + buffer.nbytes)
        if len(data) != buffer.nbytes:
            raise CorruptError(
                f"{self.path} ends {buffer.nbytes - len(data)} bytes before the end of the range "
                f"that starts at byte {offset}: it was truncated"
            )
        buffer[:] = data

    def close(self) -> None:
        return


@contextmanager
def _storage_errors(action: str, path: str) -> Iterator[None]:
    """Turn whatever a store's client raises into an error that says what was tried, where."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise StorageError(f"cannot {action} {path}: {type(error).__name__}: {error}") from error
