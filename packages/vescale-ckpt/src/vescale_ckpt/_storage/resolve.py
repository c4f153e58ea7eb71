"""Finds the storage that a path belongs to."""

import os

from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.local import LocalStorage


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the absolute path, symbolic links followed; a URL stays what it is."""
    text = os.fsdecode(path)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    if "://" in text:
        return text.rstrip("/")
    # Links are followed once and here: a checkpoint that replaces another renames at the real
    # place.
    return os.path.realpath(text)


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """Return the local file system, or for `protocol://...` one of fsspec's."""
    target = resolve(path)
    if "://" not in target:
        return LocalStorage()
    from vescale_ckpt._storage.fsspec_storage import FsspecStorage

    return FsspecStorage(target)
