"""Which storage a path belongs to."""

import os

from vescale_ckpt._save.commit import resolve
from vescale_ckpt._storage.base import LocalStorage, Storage


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """The local file system, or for `protocol://...` one of fsspec's."""
    target = resolve(path)
    if "://" not in target:
        return LocalStorage()
    from vescale_ckpt._storage.fsspec_storage import FsspecStorage

    return FsspecStorage(target)
