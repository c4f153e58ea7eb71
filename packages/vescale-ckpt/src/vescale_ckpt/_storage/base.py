"""The few file operations that a checkpoint is made of, and where their order is decided.

Everything that touches a disk goes through `Storage`, so that a test can make any one of them
fail, or be the last thing that a process does.
"""

import os
from contextlib import AbstractContextManager
from typing import Protocol

from vescale_ckpt._errors import CorruptError


class Writer(Protocol):
    """A file that is being written, front to back."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        ...

    def finish(self) -> None:
        """Make the content durable, then close."""
        ...

    def abandon(self) -> None:
        """Close, whatever the content. After `finish`, do nothing."""
        ...


class Reader(Protocol):
    """A file that is being read at any place."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; `CorruptError` where the file ends too soon."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Storage(Protocol):
    """A file system. Paths are strings with "/" between their parts."""

    # Whether it moves directories atomically. Where not, COMMIT is what is written last.
    renames: bool

    def make_directory(self, path: str) -> None:
        """Make a directory; one that exists already is fine."""
        ...

    def create(self, path: str) -> Writer:
        """Begin a file that must not exist yet."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Write a small file, durably."""
        ...

    def open(self, path: str) -> Reader:
        """Open a file for reading."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move atomically: over an existing file, or an empty directory, or nothing."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def locked(self, path: str) -> AbstractContextManager[None]:
        """Keep other writers out of a directory; a writer that dies releases it."""
        ...

    def remove_file(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def is_directory(self, path: str) -> bool:
        """Return whether a directory is there; a symbolic link to one is not, nor entered."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether anything is there."""
        ...

    def size(self, path: str) -> int:
        """Return the number of bytes in a file."""
        ...

    def names_in(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...


def remove_tree(storage: Storage, path: str) -> None:
    """Remove a directory of files and directories, deepest first."""
    # Deepest first, as only empty directories can be removed. Links are removed, never followed:
    # `is_directory` is false for them.
    for name in storage.names_in(path):
        inner = f"{path}/{name}"
        if storage.is_directory(inner):
            remove_tree(storage, inner)
        else:
            storage.remove_file(inner)
    storage.remove_directory(path)


def make_directories(storage: Storage, path: str) -> None:
    """Make `path` and the directories above it that are missing, durably."""
    parent = os.path.dirname(path)
    if storage.exists(path) or parent == path:
        return
    # From the top down, each name synced before the next: a directory cannot be durable without its
    # parent.
    make_directories(storage, parent)
    storage.make_directory(path)
    storage.sync_directory(parent)


def read_all(storage: Storage, path: str, at_most: int) -> bytes:
    """Read a small file; `CorruptError` if it is larger than `at_most` bytes."""
    # Asked before anything is allocated: a known name need not have what was written there.
    size = storage.size(path)
    if size > at_most:
        raise CorruptError(f"{path} has {size} bytes; at most {at_most} make sense")
    return _read(storage, path, 0, size)


def read_range(storage: Storage, path: str, begin: int, end: int) -> bytes:
    """Read bytes `begin` to `end` of a file; `CorruptError` if it has fewer."""
    size = storage.size(path)
    if end > size:
        raise CorruptError(f"{path} has {size} bytes, where {end} are due: it was truncated")
    return _read(storage, path, begin, end)


def _read(storage: Storage, path: str, begin: int, end: int) -> bytes:
    content = bytearray(end - begin)
    reader = storage.open(path)
    try:
        reader.read_into(begin, memoryview(content))
    finally:
        reader.close()
    return bytes(content)
