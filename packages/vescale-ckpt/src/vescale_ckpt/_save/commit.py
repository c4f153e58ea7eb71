"""Commits written data: manifest, commit record, and one rename that makes them count.

A new checkpoint appears by renaming its directory. A checkpoint that replaces another is moved in
beside it, as another generation, and takes over by renaming its COMMIT file over the old one: there
is no moment at which neither of them counts. An object store has no renames: a generation is
written where it stays, and putting COMMIT lets it count.

The order everywhere: a file is made durable before anything that refers to it is written. So
after a power failure, whatever COMMIT names is complete.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from vescale_ckpt._errors import CorruptError, ExistsError, FormatError, StorageError
from vescale_ckpt._format.manifest import (
    COMMIT,
    COMMIT_LIMIT,
    GENERATION_PREFIX,
    MANIFEST,
    CommitRecord,
    Manifest,
)
from vescale_ckpt._format.parse import is_generation
from vescale_ckpt._storage.base import Storage, make_directories, read_all, remove_tree
from vescale_ckpt._storage.commit_lookup import names_nothing, read_commit

_OLD_COMMIT = "COMMIT.old"


class SaveLocation(NamedTuple):
    """Where a checkpoint shall be, and where it is assembled first."""

    target: str
    generation: str
    # Whether it is assembled elsewhere and renamed; object stores cannot rename.
    renames: bool = True
    # Whether it may replace a checkpoint.
    overwrite: bool = False

    @property
    def staging(self) -> str:
        # A hidden sibling of the target: on the same file system, so that renaming it is atomic.
        parent, name = os.path.split(self.target)
        return f"{parent.rstrip('/')}/.{name}.saving-{self.generation}"

    @property
    def directory(self) -> str:
        return f"{self.staging if self.renames else self.target}/{self.generation}"


def new_generation() -> str:
    """Make a name that no other save uses."""
    return GENERATION_PREFIX + secrets.token_hex(8)


def open_location(storage: Storage, location: SaveLocation) -> None:
    """Refuse what must not be replaced; make the directory in which the ranks write.

    Raises:
        ExistsError: As `check_replaceable` does.
    """
    check_replaceable(storage, location)
    if storage.renames:
        make_directories(storage, os.path.dirname(location.target))
        # Not synced: if a power failure loses these, the save is lost too; nothing refers to them.
        storage.make_directory(location.staging)
    storage.make_directory(location.directory)


def check_replaceable(storage: Storage, location: SaveLocation) -> None:
    """Refuse to save over what must stay.

    Raises:
        ExistsError: The target holds something that is no checkpoint, or a checkpoint without
            `overwrite`.
    """
    target = location.target
    if _is_free(storage, target):
        return
    if not storage.exists(f"{target}/{COMMIT}"):
        raise ExistsError(f"{target} exists and is not a checkpoint: nothing is replaced")
    if not location.overwrite and not names_nothing(storage, target):
        raise ExistsError(f"{target} holds a checkpoint; pass overwrite=True to replace it")


def commit(storage: Storage, location: SaveLocation, manifest: Manifest) -> None:
    """Make everything durable, then let it count; an error leaves or restores what was there.

    Runs on rank 0 alone, after all ranks have written and synced their files.
    """
    for name, file in manifest.files.items():
        # Ranks may run on several machines. Their files have to be visible in full here: a path
        # that is not shared, or a file system that shows an older picture, is found now and not at
        # the next load.
        path = f"{location.directory}/{name}"
        if not storage.exists(path) or storage.size(path) != file.nbytes:
            raise StorageError(
                f"{path} was written by a rank but is not here in full: all ranks must save to one "
                "file system that all of them share"
            )
    content = manifest.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    record = CommitRecord(location.generation, len(content), digest)
    # The manifest, then the names in its directory (its own and the data files'), then COMMIT,
    # which holds the manifest's digest: COMMIT never refers to what may still get lost.
    storage.put(f"{location.directory}/{MANIFEST}", content)
    storage.sync_directory(location.directory)
    if not storage.renames:
        _put_commit(storage, location, record)
        return
    storage.put(f"{location.staging}/{COMMIT}", record.to_bytes())
    # The COMMIT file and the generation's directory: both names have to be durable before the
    # rename.
    storage.sync_directory(location.staging)
    _move_in(storage, location)


def discard(storage: Storage, location: SaveLocation) -> None:
    """Remove what a failed save left, unless it may count. Best effort: it may be gone."""
    # Without renames the target may hold an older checkpoint as well: only the generation goes.
    left = location.staging if location.renames else location.directory
    try:
        # Without renames the manifest is the last object before COMMIT. Where it is, COMMIT may
        # name it: a rank died after the commit; or the answer to the put of COMMIT was lost, and
        # the put itself is there, or still to come.
        if location.renames or not storage.exists(f"{left}/{MANIFEST}"):
            _remove_if_there(storage, left)
    except Exception:
        return


def _remove_if_there(storage: Storage, path: str) -> None:
    if storage.exists(path):
        remove_tree(storage, path)


def _put_commit(storage: Storage, location: SaveLocation, record: CommitRecord) -> None:
    """Commit on an object store: the last object makes it count, and nothing moves."""
    target = location.target
    try:
        # Again, as late as can be: another save may have been completed meanwhile.
        check_replaceable(storage, location)
    except ExistsError:
        # COMMIT was not put. Without its manifest, `discard` removes the rest.
        storage.remove_file(f"{location.directory}/{MANIFEST}")
        raise
    old = _counting_generation(storage, target)
    try:
        # `put` of an object is atomic, and replaces the old COMMIT: from here on the new one
        # counts.
        storage.put(f"{target}/{COMMIT}", record.to_bytes())
    except Exception as error:
        # It may have arrived, and only the answer is lost.
        if not _counts(storage, location):
            raise StorageError(
                f"{error}. {location.directory} was left there: if COMMIT still arrives, it "
                "counts; otherwise what was there before does"
            ) from error
    if old is not None and old != location.generation:
        # Only the generation that counted before: any other may be of a save that is under way.
        with suppress(Exception):
            _remove_if_there(storage, f"{target}/{old}")


def _counting_generation(storage: Storage, target: str) -> str | None:
    """Return the generation that COMMIT names; None where there is none, or it is damaged."""
    if not storage.exists(f"{target}/{COMMIT}"):
        return None
    try:
        return read_commit(storage, target).generation
    except (CorruptError, FormatError):
        return None


def _counts(storage: Storage, location: SaveLocation) -> bool:
    """Return whether COMMIT is known to name this save."""
    try:
        return _counting_generation(storage, location.target) == location.generation
    except Exception:
        return False


def _is_free(storage: Storage, target: str) -> bool:
    if not storage.exists(target):
        return True
    if not storage.is_directory(target):
        return False
    names = storage.names_in(target)
    # Without renames a save that was killed leaves its generation at the target. It counts for
    # nothing without COMMIT, and must not stand in the way of the next save.
    return not names or (not storage.renames and all(map(is_generation, names)))


def _move_in(storage: Storage, location: SaveLocation) -> None:
    """Commit by renaming, to where nothing is or over what may be replaced."""
    target = location.target
    if _is_free(storage, target):
        try:
            _appear(storage, location)
            return
        except StorageError:
            # Another save may have appeared first. Then this one is still where it was assembled.
            if _is_free(storage, target) or not storage.exists(location.staging):
                raise
    # Locked: of two saves that replace one checkpoint at the same time, the second would remove
    # the generation of the first between its two renames.
    with storage.locked(target):
        # Again: another save may have been completed while this one was written.
        check_replaceable(storage, location)
        _take_over(storage, location)


def _appear(storage: Storage, location: SaveLocation) -> None:
    def withdraw() -> None:
        # A network file system may report a rename as failed that has happened.
        if not storage.exists(location.staging):
            storage.rename(location.target, location.staging)

    with _withdrawn_on_failure(location, withdraw):
        # The rename makes it count; the sync makes that last. A failed sync takes it back: a save
        # that is reported as failed must not be there later.
        storage.rename(location.staging, location.target)
        storage.sync_directory(os.path.dirname(location.target))


def _take_over(storage: Storage, location: SaveLocation) -> None:
    target, generation = location.target, f"{location.target}/{location.generation}"
    try:
        old_commit = read_all(storage, f"{target}/{COMMIT}", COMMIT_LIMIT)
    except CorruptError:
        # Damaged: nothing that could be restored, but no reason not to replace it.
        old_commit = b""
    # A copy of the old record beside the new one: `withdraw` renames it back, which is atomic, too.
    storage.put(f"{location.staging}/{_OLD_COMMIT}", old_commit)

    def withdraw() -> None:
        # The old record first, as its generation is still there; then the new generation may leave.
        storage.rename(f"{location.staging}/{_OLD_COMMIT}", f"{target}/{COMMIT}")
        if storage.exists(generation):
            storage.rename(generation, location.directory)

    with _withdrawn_on_failure(location, withdraw):
        # The new generation is beside the old one, durably, before the rename of COMMIT names it.
        # The old one counts until then and the new one from then on.
        storage.rename(location.directory, generation)
        storage.sync_directory(target)
        storage.rename(f"{location.staging}/{COMMIT}", f"{target}/{COMMIT}")
        storage.sync_directory(target)
    # Outside of the withdrawal: from here on the new one counts, whatever happens to the old one.
    _remove_old(storage, location)


@contextmanager
def _withdrawn_on_failure(location: SaveLocation, withdraw: Callable[[], None]) -> Iterator[None]:
    """Undo the renames of a commit that fails: what is reported as failed must not count."""
    try:
        yield
    except Exception as error:
        try:
            withdraw()
        except Exception:
            raise StorageError(
                f"{error}. Nor could the save be withdrawn: a complete checkpoint is at "
                f"{location.target}, but whether it is the new one after a power cut is not known"
            ) from error
        raise


def _remove_old(storage: Storage, location: SaveLocation) -> None:
    """Remove what is left of the old generation: the new one counts."""
    discard(storage, location)
    try:
        # Every other generation: a save under way keeps its own in its staging directory until it
        # holds the lock.
        for name in storage.names_in(location.target):
            if is_generation(name) and name != location.generation:
                remove_tree(storage, f"{location.target}/{name}")
    except Exception:
        return
