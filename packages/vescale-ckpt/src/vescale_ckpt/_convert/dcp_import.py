"""Imports checkpoints of torch.distributed.checkpoint (DCP) without running any code of theirs.

Their metadata is a pickle, and so is every value and tensor: all are read as data, by tables of the
few names that such files hold.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vescale_ckpt._convert.dcp_metadata import (
    METADATA,
    StoredBytes,
    TensorPlan,
    parse_metadata,
)
from vescale_ckpt._coordination.coordinator import SingleProcess
from vescale_ckpt._errors import FormatError, NotFoundError, StateError
from vescale_ckpt._format.pickle_data import PickleRefusedError
from vescale_ckpt._format.torch_file import read_torch_file
from vescale_ckpt._progress import Progress
from vescale_ckpt._save.save import SaveOptions, save_with
from vescale_ckpt._storage.base import read_all, read_range
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.boxes import narrow_to
from vescale_ckpt._tensors.regions import whole

_MOST_METADATA = 1 << 27
# How many entries of lists may be missing. The numbers are the file's: a list takes memory.
_MOST_DROPPED = 1 << 20


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
        FormatError: The metadata is not DCP's, names a class that it does not need, contradicts
            itself, or refers to a file outside.
        StateError: A value is no plain value, or refers to itself.
        CorruptError: A file is too short, or no regular one.
        CheckpointError: Nothing is there, or saving failed.
    """
    folder, storage = resolve(source), LocalStorage()
    if not storage.exists(f"{folder}/{METADATA}"):
        raise NotFoundError(f"{folder} has no {METADATA}: it is no checkpoint of DCP")
    plan, paths = parse_metadata(read_all(storage, f"{folder}/{METADATA}", _MOST_METADATA))
    leaves = {
        name: _tensor(folder, name, one)
        if isinstance(one, TensorPlan)
        else _read(folder, name, one)
        for name, one in plan.items()
    }
    state = _nested(leaves, paths)
    options = SaveOptions(overwrite=overwrite, progress=progress)
    save_with(storage_of(path), SingleProcess(), path, state, options)
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves.values())


def _read(folder: str, name: str, item: StoredBytes) -> Any:
    """Read one stored item, as tensors and plain values only."""
    path, end = f"{folder}/{item.file}", item.offset + item.length
    content = read_range(LocalStorage(), path, item.offset, end)
    try:
        return read_torch_file(content)
    except PickleRefusedError as error:
        words = f"not a tensor nor a plain value: {error}"
        raise StateError(f"'{name[:80]}' in {path}: {words}") from None


def _tensor(folder: str, name: str, plan: TensorPlan) -> torch.Tensor:
    # Not zeroed: the chunks cover it, each element once.
    made = torch.empty(plan.shape, dtype=plan.dtype, device="cpu")
    for region, item in plan.chunks:
        part = _read(folder, name, item)
        if not isinstance(part, torch.Tensor) or part.shape != region.shape:
            raise FormatError(f"'{name[:80]}': the chunk at {region} is not a {region.shape}")
        if part.dtype != plan.dtype:
            raise FormatError(f"'{name[:80]}': the chunk at {region} is of {part.dtype}")
        narrow_to(made, whole(plan.shape), region).copy_(part)
    return made


class _Leaf(NamedTuple):
    """A stored value: what is in it is the value's own, also a dict with integer keys."""

    value: Any


def _nested(
    leaves: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> dict[Any, Any]:
    """Undo the flattening of DCP, which keeps the way to every leaf: integers index lists."""
    root: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        *before, last = paths.get(name, (name,))
        inner = root
        for step in before:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise FormatError(f"'{name[:80]}' lies below a value that is not a container")
        if last in inner:
            raise FormatError(f"'{name[:80]}' lies where something else does")
        inner[last] = _Leaf(leaf)
    lists = _Lists()
    return {key: lists.made_of(entry) for key, entry in root.items()}


class _Lists:
    """Makes lists of dicts whose keys are all integers."""

    def __init__(self) -> None:
        self.dropped = 0

    def made_of(self, node: Any) -> Any:
        """Return a node with lists in it; its depth is bounded by the ways to the leaves."""
        if isinstance(node, _Leaf):
            return node.value
        entries = {key: self.made_of(entry) for key, entry in node.items()}
        if not all(type(key) is int for key in entries):
            return entries
        length = max(entries) + 1
        # Of all lists together: there may be one for every entry.
        self.dropped += length - len(entries)
        if min(entries) < 0 or self.dropped > _MOST_DROPPED:
            raise FormatError(f"a list has entries {min(entries)} to {max(entries)}")
        # DCP drops what is empty and is no value: dicts. Those at the end of a list leave no trace.
        return [entries.get(index, {}) for index in range(length)]
