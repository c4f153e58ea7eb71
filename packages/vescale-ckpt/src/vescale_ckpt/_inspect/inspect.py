"""`inspect`: what a checkpoint holds, and what is in its tensors if that is asked for."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vescale_ckpt._format.manifest import TensorRecord
from vescale_ckpt._load.fetch import fetch, uncounted
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._load.reads import plan_reads
from vescale_ckpt._progress import ByteCounter, Progress, silent
from vescale_ckpt._state.rebuild import holds_tensor, rebuild
from vescale_ckpt._state.select import wanted_by
from vescale_ckpt._state.state_keys import child
from vescale_ckpt._state.values import Node
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.dtypes import torch_dtype
from vescale_ckpt._tensors.local_boxes import local_and_boxes


@dataclass(frozen=True)
class SavedChunk:
    """A box of a tensor (in elements), and which bytes of which file hold it, row-major."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Statistics:
    """What is in a tensor. Of complex numbers, and of nothing, there is no order and no mean.

    Attributes:
        first: Its first elements, at most four.
        least, mean, largest: Of all its elements; nan if any of them is.
        not_finite: How many are nan or infinite.
    """

    first: tuple[Any, ...]
    least: float | int | bool | None = None
    mean: float | None = None
    largest: float | int | bool | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: its global shape, and the boxes it was saved in."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: tuple[SavedChunk, ...]
    statistics: Statistics | None = None


@dataclass(frozen=True)
class Inspected:
    """What `inspect` found. Values are by name, as they were saved; files by name, in bytes."""

    path: str
    generation: str
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    files: dict[str, int]
    provenance: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of all data files."""
        return sum(self.files.values())


def inspect(
    path: str | os.PathLike[str],
    *,
    only: str | Iterable[str] | None = None,
    statistics: bool = False,
    progress: Progress | None = None,
) -> Inspected:
    """Tell what the checkpoint at `path` holds. For this process only: not collective.

    Reads and verifies the commit record and the manifest; tensors only for `statistics`, one at a
    time.

    Args:
        path: A checkpoint.
        only: Globs of the names of the tensors and values to tell of; by default all.
        statistics: Also read the tensors, and tell what is in them.
        progress: Called with (bytes read, bytes to read).

    Raises:
        CheckpointError: There is no committed checkpoint at `path`, or it is damaged.

    Examples:
        >>> import tempfile, torch, vescale_ckpt
        >>> path = tempfile.mkdtemp() + "/step-1"
        >>> vescale_ckpt.save(path, {"weight": torch.tensor([1.0, 3.0]), "step": 1})
        >>> found = vescale_ckpt.inspect(path, statistics=True)
        >>> found.values, found.tensors["weight"].shape, found.tensors["weight"].statistics.mean
        ({'step': 1}, (2,), 2.0)
    """
    storage = storage_of(path)
    checkpoint = open_checkpoint(storage, resolve(path))
    manifest = checkpoint.manifest
    patterns = only if only is None or isinstance(only, str) else tuple(only)
    names = [name for name in manifest.tensors if wanted_by(patterns, name)]
    count = ByteCounter(sum(_nbytes(manifest.tensors[name]) for name in names), progress or silent)
    tensors = {}
    for name in names:
        found = None
        if statistics:
            found = _statistics(read_full_tensor(storage, checkpoint, name))
            count.add(_nbytes(manifest.tensors[name]))
        tensors[name] = _saved(manifest.tensors[name], found)
    values = values_of(manifest.state)
    return Inspected(
        path=checkpoint.path,
        generation=checkpoint.generation,
        tensors=tensors,
        values={name: value for name, value in values.items() if wanted_by(patterns, name)},
        files={name: file.nbytes for name, file in manifest.files.items()},
        provenance=manifest.provenance,
    )


def read_full_tensor(storage: Storage, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read one tensor of a checkpoint, verified."""
    record = checkpoint.manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="cpu")
    reads = plan_reads(checkpoint.manifest, [(name, *local_and_boxes(tensor))])
    fetch(storage, checkpoint, reads, uncounted())
    return tensor


def values_of(state: Node) -> dict[str, Any]:
    """Return every plain value by name; a subtree without tensors and dicts is one value."""
    return dict(_values(state, "", top=True))


def _values(node: Node, name: str, *, top: bool = False) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and "dict" in node:
        for key, entry in node["dict"]:
            yield from _values(entry, child(name, key, top=top))
    elif isinstance(node, dict) and "tensor" in node:
        return
    elif not holds_tensor(node):
        yield name, rebuild(node, {})
    else:
        kind, items = ("list", node) if isinstance(node, list) else next(iter(node.items()))
        step = "~r" if kind == "rank_local" else ""
        for i, entry in enumerate(items):
            yield from _values(entry, f"{name}/{step}{i}")


def _saved(record: TensorRecord, statistics: Statistics | None) -> SavedTensor:
    chunks = tuple(
        SavedChunk(*chunk.region, chunk.file, chunk.start, chunk.nbytes) for chunk in record.chunks
    )
    return SavedTensor(record.dtype, record.shape, _nbytes(record), chunks, statistics)


def _nbytes(record: TensorRecord) -> int:
    return sum(chunk.nbytes for chunk in record.chunks)


def _statistics(tensor: torch.Tensor) -> Statistics:
    first = tuple(tensor.reshape(-1)[:4].tolist())
    if not tensor.numel() or tensor.is_complex():
        return Statistics(first)
    # Integers as they are: above 2 ** 53 a float would tell another number.
    x = tensor.to(torch.float64)
    exact = x if tensor.is_floating_point() else tensor.reshape(-1)
    least, largest = (exact.min(), exact.max()) if _ordered(exact) else (x.min(), x.max())
    return Statistics(
        first=first,
        least=least.item(),
        mean=x.mean().item(),
        largest=largest.item(),
        not_finite=int((~x.isfinite()).sum()),
    )


def _ordered(tensor: torch.Tensor) -> bool:
    """Return whether torch can compare such elements: some unsigned integers it cannot."""
    return tensor.dtype not in (torch.uint16, torch.uint32, torch.uint64)
