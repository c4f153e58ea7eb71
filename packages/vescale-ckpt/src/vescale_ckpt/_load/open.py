"""Opens a committed checkpoint, or says clearly what is there instead."""

import difflib
import hashlib
import os
from dataclasses import dataclass

from vescale_ckpt._errors import CorruptError, NotFoundError, UncommittedError, listed
from vescale_ckpt._format.manifest import COMMIT, MANIFEST, CommitRecord, Manifest
from vescale_ckpt._format.parse import parse_manifest
from vescale_ckpt._storage.base import Storage, read_all
from vescale_ckpt._storage.commit_lookup import has_commit, read_commit

# Far above any real one: a manifest of this size would describe petabytes.
_MANIFEST_LIMIT = 4 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose manifest has been verified."""

    path: str
    generation: str
    manifest: Manifest

    def file(self, name: str) -> str:
        """Return the path of one of its data files."""
        return f"{self.path}/{self.generation}/{name}"


def open_checkpoint(storage: Storage, path: str) -> Checkpoint:
    """Read and verify the commit record and the manifest, and the sizes of the data files."""
    if not storage.is_directory(path):
        raise NotFoundError(_nothing_at(storage, path))
    if not storage.exists(f"{path}/{COMMIT}"):
        raise UncommittedError(_not_committed(storage, path))
    # COMMIT is read first and once: it names one generation, which no later save changes. If a save
    # replaces the checkpoint now, files of this generation are missing, which is an error and no
    # mixture.
    record = read_commit(storage, path)
    checkpoint = Checkpoint(path, record.generation, read_manifest(storage, path, record))
    _check_sizes(storage, checkpoint)
    return checkpoint


def read_manifest(storage: Storage, path: str, record: CommitRecord) -> Manifest:
    """Read and verify the manifest that a commit record names; looks at no data file."""
    manifest_path = f"{path}/{record.generation}/{MANIFEST}"
    if not storage.exists(manifest_path):
        raise CorruptError(f"{manifest_path} is missing, though COMMIT names it")
    # Never more than COMMIT says, nor than makes sense: both numbers come from a disk.
    content = read_all(storage, manifest_path, min(record.manifest_bytes, _MANIFEST_LIMIT))
    digest = hashlib.sha256(content).hexdigest()
    if (len(content), digest) != (record.manifest_bytes, record.manifest_sha256):
        raise CorruptError(
            f"{manifest_path}: its {len(content)} bytes do not have the digest that COMMIT holds"
        )
    # Parsed only after its digest is verified.
    return parse_manifest(content)


def _check_sizes(storage: Storage, checkpoint: Checkpoint) -> None:
    # Before anything is allocated by the manifest's word: it cannot claim more than is there.
    for name, record in checkpoint.manifest.files.items():
        path = checkpoint.file(name)
        if not storage.exists(path):
            raise CorruptError(f"{path} is missing, though the manifest lists it")
        size = storage.size(path)
        if size != record.nbytes:
            raise CorruptError(f"{path} has {size} bytes, but {record.nbytes} were saved")


def _nothing_at(storage: Storage, path: str) -> str:
    if storage.exists(path):
        return f"{path} is a file; a checkpoint is a directory"
    parent, name = os.path.split(path)
    if not storage.is_directory(parent):
        return f"there is no checkpoint at {path}: the directory {parent} does not exist"
    names = storage.names_in(parent)
    message = f"there is no checkpoint at {path}"
    if any(other.startswith(f".{name}.saving-") for other in names):
        message += " (a save into it was begun and never completed)"
    near = difflib.get_close_matches(name, [n for n in names if not n.startswith(".")], n=3)
    return message + (f"; did you mean {listed(near)}?" if near else "")


def _not_committed(storage: Storage, path: str) -> str:
    inside = [n for n in storage.names_in(path) if has_commit(storage, f"{path}/{n}")]
    if inside:
        return f"{path} is not a checkpoint but holds some: {listed(inside[-3:])}"
    return f"{path} has no {COMMIT} record: no save into it was ever completed"
