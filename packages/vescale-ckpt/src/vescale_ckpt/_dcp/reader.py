"""`dcp.StorageReader`: lets `torch.distributed.checkpoint.load` read this format."""

import io
import os
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from vescale_ckpt._dcp.names import leaves_of
from vescale_ckpt._dcp.path import NextPath
from vescale_ckpt._errors import CorruptError, MismatchError, StateError
from vescale_ckpt._format.manifest import TensorRecord
from vescale_ckpt._load.fetch import fetch
from vescale_ckpt._load.open import Checkpoint, open_checkpoint
from vescale_ckpt._load.reads import Target, blocks_nbytes, plan_reads
from vescale_ckpt._progress import ByteCounter, Progress, silent
from vescale_ckpt._state.rebuild import holds_tensor, rebuild
from vescale_ckpt._state.values import Node, kind_of
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.boxes import Box, TensorBoxes
from vescale_ckpt._tensors.dtypes import converts, torch_dtype


class StorageReader(NextPath, torch_storage.StorageReader):
    """Lets `torch.distributed.checkpoint.load` read a checkpoint of this package.

    One that `dcp.save` has written through `StorageWriter`, or that `save` has; keys are joined
    with dots, as DCP does. Each rank reads the blocks that it needs, and verifies each first.

    Args:
        path: a checkpoint, as a path or a URL of fsspec. `checkpoint_id` of `dcp.load` takes its
            place.
        cast: convert where the dtypes differ; otherwise that is an error.
        progress: called with (bytes read, bytes to read) of this rank.

    Raises:
        CheckpointError: from `dcp.load`, inside of its `CheckpointException`, on every rank; see
            `load`. Tensors may then hold a mixture of old and new.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        cast: bool = False,
        progress: Progress | None = None,
    ) -> None:
        NextPath.__init__(self, path)
        self._cast, self._progress = cast, progress or silent
        self._checkpoint: Checkpoint | None = None
        self._leaves: dict[str, Node] = {}

    # No `**kwargs`: torch would ask again for a rank's own metadata, and hide the error.
    def read_metadata(self) -> Metadata:
        """Open the checkpoint, verify its manifest, and describe it in DCP's words."""
        if self._path is None:
            raise StateError("no path: StorageReader(path), or dcp.load(..., checkpoint_id=path)")
        self._checkpoint = open_checkpoint(self._storage, resolve(self._path))
        manifest = self._checkpoint.manifest
        self._leaves = leaves_of(manifest.state)
        entries = {
            name: _tensor_metadata(manifest.tensors[node["tensor"]])
            if kind_of(node) == "tensor"
            else BytesStorageMetadata()
            for name, node in self._leaves.items()
        }
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which generation this rank has opened."""
        assert self._checkpoint is not None
        return replace(plan, storage_data=self._checkpoint.generation)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what the ranks have opened (coordinator)."""
        found = sorted({str(plan.storage_data) for plan in plans})
        if len(found) > 1:
            raise CorruptError(
                f"ranks opened {len(found)} checkpoints: a save replaced one just now"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, verify and copy what the plan names."""
        assert self._checkpoint is not None
        manifest = self._checkpoint.manifest
        wanted = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        tensors = [planner.resolve_tensor(item).detach() for item in wanted]
        pairs = list(zip(wanted, tensors, strict=True))
        # All of them before the first byte is read.
        targets = [self._target(item, tensor) for item, tensor in pairs if tensor.numel()]
        reads = plan_reads(manifest, targets)
        total = sum(blocks_nbytes(r.chunk, r.blocks, manifest.block_bytes) for r in reads)
        fetch(self._storage, self._checkpoint, reads, ByteCounter(total, self._progress))
        for item, tensor in pairs:
            planner.commit_tensor(item, tensor)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(item.storage_index.fqn))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _target(self, item: ReadItem, tensor: torch.Tensor) -> Target:
        """Return where a box of a tensor goes: into `tensor`, which has the shape of the box."""
        assert self._checkpoint is not None
        name = self._leaves[item.storage_index.fqn]["tensor"]
        record = self._checkpoint.manifest.tensors[name]
        saved = torch_dtype(record.dtype)
        if tensor.dtype != saved and not (self._cast and converts(saved, tensor.dtype)):
            hint = "StorageReader(path, cast=True) converts"
            if not converts(saved, tensor.dtype):
                hint = "those are other kinds of numbers"
            raise MismatchError(
                f"'{item.storage_index.fqn}': the checkpoint holds {record.dtype}, the state has "
                f"{tensor.dtype}; {hint}"
            )
        chunk = item.storage_index.offset or (0,) * len(record.shape)
        begin = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
        box = Box(begin, tuple(item.lengths), 0, tensor.stride())
        return name, tensor, TensorBoxes(record.shape, (box,))

    def _bytes(self, name: str) -> io.BytesIO:
        """Return a plain value as DCP takes it: as `torch.save` would have written it."""
        node = self._leaves[name]
        if kind_of(node) == "rank_local" or holds_tensor(node):
            raise StateError(f"'{name}': DCP cannot load this; use vescale_ckpt.load")
        stored = io.BytesIO()
        torch.save(rebuild(node, {}), stored)
        stored.seek(0)
        return stored

    @property
    def _storage(self) -> Storage:
        assert self._path is not None
        return storage_of(self._path)


def _tensor_metadata(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(one.region.offset), torch.Size(one.region.shape))
        for one in record.chunks
    ]
    properties = TensorProperties(dtype=torch_dtype(record.dtype))
    return TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
