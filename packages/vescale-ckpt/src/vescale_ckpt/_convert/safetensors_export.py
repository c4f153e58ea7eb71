"""Exports to Hugging Face: `model.safetensors`, or shards with an index; one tensor at a time."""

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vescale_ckpt._errors import ExistsError, StateError
from vescale_ckpt._format.safetensors import bytes_of, encode_header, header_entry
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._inspect.inspect import read_full_tensor
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._progress import Progress, silent
from vescale_ckpt._state.select import wanted_by
from vescale_ckpt._storage.base import Storage, make_directories, remove_tree
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.dtypes import STORED_AS
from vescale_ckpt._tensors.regions import whole
from vescale_ckpt._untrusted import INDEX

_SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class Exported:
    """What `export_safetensors` wrote: files in order, tensors and their bytes."""

    files: list[str]
    tensors: int
    nbytes: int


def export_safetensors(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    at: str = "",
    only: str | Iterable[str] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Write tensors of the checkpoint at `path` as Hugging Face's safetensors files.

    The bytes of every tensor are those that were saved, verified. One tensor at a time is in
    memory. `folder` appears when all is written. For this process only: not collective.

    Args:
        path: A checkpoint.
        folder: Where the files shall be; must not exist yet.
        at: Export what is below this name, such as "model"; what follows it is the tensor's name,
            with "." for "/".
        only: Globs for the exported names.
        shard_bytes: Begin another file where one would get larger; a tensor is never divided.
        progress: Called with (bytes written, bytes to write).

    Raises:
        ExistsError: There is something at `folder`.
        StateError: Nothing is at `at`, two tensors would get one name, or a dtype is none of
            safetensors'.
        CheckpointError: The checkpoint cannot be read, or the files cannot be written.
    """
    storage, target = LocalStorage(), resolve(folder)
    if storage.exists(target):
        raise ExistsError(f"{target} exists: nothing is replaced")
    checkpoint = open_checkpoint(storage_of(path), resolve(path))
    items = _named(checkpoint, at, only)
    shards = list(_shards(items, shard_bytes))
    parent, name = os.path.split(target)
    make_directories(storage, parent)
    # A hidden sibling, renamed when complete: `folder` is never seen half written.
    staging = f"{parent}/.{name}.exporting-{secrets.token_hex(8)}"
    storage.make_directory(staging)
    try:
        files = _write_all(
            storage, storage_of(path), checkpoint, staging, shards, progress or silent
        )
        # The names of the files before the name of the folder, and that before success is reported.
        storage.sync_directory(staging)
        storage.rename(staging, target)
        storage.sync_directory(parent)
    except Exception:
        remove_tree(storage, staging)
        raise
    return Exported(files, len(items), sum(item.nbytes for _, item in items))


# The name in the files, and the full tensor as an item of the checkpoint.
_Named = tuple[str, WriteItem]


def _named(checkpoint: Checkpoint, at: str, only: str | Iterable[str] | None) -> list[_Named]:
    found: dict[str, WriteItem] = {}
    patterns = only if only is None or isinstance(only, str) else tuple(only)
    for name, tensor in checkpoint.manifest.tensors.items():
        if at and not name.startswith(f"{at}/"):
            continue
        inner = name[len(at) + 1 :] if at else name
        steps = [s.removeprefix("~s").replace("~1", "/").replace("~0", "~")
                 for s in inner.split("/")]  # fmt: skip
        label = ".".join(steps)
        if not wanted_by(patterns, label):
            continue
        if label in found:
            raise StateError(f"'{found[label].name}' and '{name}' would both be called '{label}'")
        stored = STORED_AS[tensor.dtype]
        # Our own files store these as something else, which the manifest explains; nothing would.
        if stored.per_element > 1 or (stored.safetensors == "U8" and tensor.dtype != "uint8"):
            raise StateError(f"'{name}': safetensors has no {tensor.dtype}; leave it out with only")
        found[label] = WriteItem(name, tensor.dtype, whole(tensor.shape))
    if not found:
        raise StateError(f"{checkpoint.path} holds no tensor below '{at}' that is wanted")
    # Widest elements first, as in our own files: every tensor is aligned to its element.
    return sorted(found.items(), key=lambda e: (-STORED_AS[e[1].dtype].itemsize, e[0]))


def _shards(items: list[_Named], shard_bytes: int) -> Iterator[list[_Named]]:
    shard: list[_Named] = []
    size = 0
    for named in items:
        if shard and size + named[1].nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(named)
        size += named[1].nbytes
    yield shard


def _write_all(
    storage: Storage,
    source: Storage,
    checkpoint: Checkpoint,
    folder: str,
    shards: list[list[_Named]],
    tell: Progress,
) -> list[str]:
    total, done = sum(item.nbytes for shard in shards for _, item in shard), 0
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        entries, begin = {}, 0
        for name, item in shard:
            entries[name] = header_entry(item, begin)
            begin += item.nbytes
            weight_map[name] = file
        writer = storage.create(f"{folder}/{file}")
        try:
            writer.write(memoryview(encode_header(entries, part=False)))
            for _, item in shard:
                writer.write(bytes_of(read_full_tensor(source, checkpoint, item.name)))
                done += item.nbytes
                tell(done, total)
            writer.finish()
        finally:
            writer.abandon()
        files.append(file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        storage.put(f"{folder}/{INDEX}", (json.dumps(index, indent=2) + "\n").encode())
        files.append(INDEX)
    return files
