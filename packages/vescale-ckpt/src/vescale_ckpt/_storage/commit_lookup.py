"""Tells from COMMIT which generation counts at a path, if any does."""

from vescale_ckpt._errors import CorruptError, FormatError, StorageError
from vescale_ckpt._format.manifest import COMMIT, COMMIT_LIMIT, CommitRecord
from vescale_ckpt._format.parse import parse_commit
from vescale_ckpt._storage.base import Storage, read_all


def read_commit(storage: Storage, path: str) -> CommitRecord:
    """Read the commit record of a checkpoint; `FormatError` or `CorruptError` if it is damaged."""
    return parse_commit(read_all(storage, f"{path}/{COMMIT}", COMMIT_LIMIT))


def has_commit(storage: Storage, path: str) -> bool:
    """Return whether `path` is a directory with a COMMIT, whatever that says."""
    return storage.is_directory(path) and storage.exists(f"{path}/{COMMIT}")


def is_committed(storage: Storage, path: str) -> bool:
    """Return whether a save into `path` was completed. Does not look at the data."""
    return has_commit(storage, path) and not names_nothing(storage, path)


def names_nothing(storage: Storage, path: str) -> bool:
    """Return whether the COMMIT of `path` names a generation that is not there."""
    try:
        record = read_commit(storage, path)
        if storage.is_directory(f"{path}/{record.generation}"):
            return False
        # Unless a save has replaced the checkpoint between these two looks.
        return read_commit(storage, path) == record
    except (CorruptError, FormatError):
        # What it named is not known, so it counts as something.
        return False
    except StorageError:
        # The checkpoint may have been removed meanwhile.
        if storage.exists(f"{path}/{COMMIT}"):
            raise
        return True
