"""Imports checkpoints of torch.distributed.checkpoint (DCP) without running any code of theirs.

Their metadata is a pickle, and so is every value and tensor. Here the metadata is read by an
unpickler that knows the few classes such a file holds and refuses every other name, and the rest by
`torch.load(weights_only=True)`.
"""

import io
import os
import pickle  # noqa: TID251 only to refuse: see _Unpickler
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch

from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._errors import FormatError, NotFoundError, StateError
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.base import read_all
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.resolve import resolve, storage_of

_METADATA = ".metadata"
_MOST_METADATA = 1 << 30
# How many entries of a list may be missing. The numbers are the file's: a list takes memory.
_MOST_DROPPED = 1 << 20
_CHECKPOINT = "torch.distributed.checkpoint"
# What a .metadata file of torch 2.x names; everything else is refused.
_ALLOWED = {
    **dict.fromkeys(
        ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
         "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        f"{_CHECKPOINT}.metadata",
    ),
    "_StorageInfo": f"{_CHECKPOINT}.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
    "OrderedDict": "collections",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of DCP and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Where it was saved to. As a name only: a pure path touches no disk.
        if (module.partition(".")[0], name) in (
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        ):
            return PurePosixPath
        # So Python 3.11.0 to 3.11.3 pickles a member of an enum.
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if _ALLOWED.get(name) != module:
            raise FormatError(f"{_METADATA} names {module}.{name}, which no DCP metadata needs")
        return super().find_class(module, name)


def _memory_format(found: Any, name: Any) -> Any:
    """The attribute that a file may ask for by name: a member of DCP's own enum, no other."""
    from torch.distributed.checkpoint import metadata

    encodings = metadata._MEM_FORMAT_ENCODING
    if found is encodings and name in encodings.__members__:
        return encodings[name]
    raise FormatError(f"{_METADATA} asks for an attribute {name!r}, which no DCP metadata needs")


def import_dcp(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> int:
    """Save what a checkpoint of torch.distributed.checkpoint holds as the checkpoint `path`.

    All of the state is in memory meanwhile. For this process only: not collective. DCP has no
    checksums: what was damaged before is imported as it is. Empty dicts, which DCP does not store,
    are there again between the entries of a list, and nowhere else.

    Args:
        source: The directory that `torch.distributed.checkpoint.save` wrote.
        path: Where the checkpoint shall be.
        overwrite: Replace the checkpoint at `path`.
        progress: Called with (bytes written, bytes to write).

    Returns:
        The number of tensors.

    Raises:
        FormatError: The metadata is not DCP's, names a class that it does not need, or refers to
            a file outside.
        StateError: A value is no plain value.
        CheckpointError: Nothing is there, or saving failed.
    """
    folder, storage = resolve(source), LocalStorage()
    if not storage.exists(f"{folder}/{_METADATA}"):
        raise NotFoundError(f"{folder} has no {_METADATA}: it is no checkpoint of DCP")
    metadata = _unpickled(read_all(storage, f"{folder}/{_METADATA}", _MOST_METADATA))
    leaves: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            leaves[name] = _tensor(folder, metadata, name, entry)
        else:
            leaves[name] = _value(folder, metadata, name)
    state = _nested(leaves, metadata.planner_data)
    options = SaveOptions(overwrite=overwrite, progress=progress)
    save_with(storage_of(path), SingleProcess(), path, state, options)
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves.values())


def _unpickled(content: bytes) -> Any:
    # Their classes must be there to be found; finding them runs nothing of the file's.
    import torch.distributed.checkpoint  # noqa: F401

    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{_METADATA}: not a metadata file of DCP: {error}") from None
    if type(metadata).__name__ != "Metadata":
        raise FormatError(f"{_METADATA} holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


def _loaded(folder: str, info: Any, name: str) -> Any:
    """Read one stored item, as tensors and plain values only."""
    file = str(info.relative_path)
    # The name comes from the file: it must not lead out of the folder.
    if os.path.basename(file) != file or file in ("", ".", ".."):
        raise FormatError(f"'{name}': file {file[:80]!r} lies outside the checkpoint")
    if getattr(info, "transform_descriptors", None):
        raise FormatError(f"'{name}': stored with transforms {info.transform_descriptors}")
    with open(f"{folder}/{file}", "rb") as handle:
        handle.seek(int(info.offset))
        content = io.BytesIO(handle.read(int(info.length)))
    try:
        return torch.load(content, weights_only=True, map_location="cpu")  # noqa: TID251 safe
    except Exception as error:
        first = str(error).splitlines()[0]
        raise StateError(f"'{name}': not a tensor nor a plain value: {first[:200]}") from None


def _tensor(folder: str, metadata: Any, name: str, entry: Any) -> torch.Tensor:
    # Not zeroed: the number of elements that were filled is checked at the end.
    whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    filled = 0
    infos = {i.offset: info for i, info in metadata.storage_data.items() if i.fqn == name}
    for chunk in entry.chunks:
        # A tensor that was not sharded may be stored under no offset.
        info = infos.get(chunk.offsets, infos.get(None))
        if info is None:
            raise FormatError(f"'{name}': nothing is stored for the chunk at {chunk.offsets}")
        part = _loaded(folder, info, name)
        if not isinstance(part, torch.Tensor) or part.shape != chunk.sizes:
            raise FormatError(f"'{name}': the chunk at {chunk.offsets} is not a {chunk.sizes}")
        view = whole
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            view = view.narrow(dim, start, size)
        view.copy_(part)
        filled += part.numel()
    if filled != whole.numel():
        raise FormatError(f"'{name}': {filled} of {whole.numel()} elements are stored")
    return whole


def _value(folder: str, metadata: Any, name: str) -> Any:
    infos = [info for index, info in metadata.storage_data.items() if index.fqn == name]
    if len(infos) != 1:
        raise FormatError(f"'{name}': stored {len(infos)} times")
    return _loaded(folder, infos[0], name)


class _Leaf(NamedTuple):
    """A stored value: what is in it is the value's own, also a dict with integer keys."""

    value: Any


def _nested(leaves: Mapping[str, Any], paths: Any) -> dict[Any, Any]:
    """Undo the flattening of DCP, which keeps the way to every leaf: integers index lists."""
    if not isinstance(paths, dict):
        return dict(leaves)
    root: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *before, last = paths.get(name, (name,))
        inner = root
        for step in before:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise FormatError(f"'{name}' lies below a value that is not a container")
        inner[last] = _Leaf(leaf)
    return {key: _with_lists(entry) for key, entry in root.items()}


def _with_lists(node: Any) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    entries = {key: _with_lists(entry) for key, entry in node.items()}
    if not all(type(key) is int for key in entries):
        return entries
    length = max(entries) + 1
    if min(entries) < 0 or length > len(entries) + _MOST_DROPPED:
        raise FormatError(f"a list has entries {min(entries)} to {max(entries)}")
    # DCP drops what is empty and is no value: dicts. Those at the end of a list leave no trace.
    return [entries.get(index, {}) for index in range(length)]
