"""`dcp.StorageWriter`: what `torch.distributed.checkpoint.save` writes, in this format."""

import io
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.planner import WriteItem as DcpItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vescale_ckpt._dcp.names import paths_of, tensor_name, tree_of
from vescale_ckpt._dcp.path import NextPath
from vescale_ckpt._dcp.place import Place
from vescale_ckpt._errors import StateError
from vescale_ckpt._format import checksums
from vescale_ckpt._format.parse import parse_manifest
from vescale_ckpt._format.pickle_data import PickleRefusedError
from vescale_ckpt._format.safetensors import bytes_of, check_byte_order
from vescale_ckpt._format.torch_file import read_torch_file
from vescale_ckpt._format.write_item import WriteItem
from vescale_ckpt._progress import Progress, silent
from vescale_ckpt._save.assemble import assembled
from vescale_ckpt._save.commit import (
    SaveLocation,
    commit,
    discard,
    new_generation,
    open_location,
)
from vescale_ckpt._save.write import WriteJob, as_one_file, write_data
from vescale_ckpt._state.flatten import flatten
from vescale_ckpt._state.values import Node
from vescale_ckpt._storage.base import Storage
from vescale_ckpt._storage.resolve import resolve, storage_of
from vescale_ckpt._tensors.boxes import narrow_to
from vescale_ckpt._tensors.dtypes import dtype_name
from vescale_ckpt._tensors.regions import Region, intersect


class RankRecords(NamedTuple):
    """What one rank tells the coordinator: its file's records, and nodes of plain values."""

    files: list[dict[str, Any]]
    values: dict[str, Node]


class StorageWriter(NextPath, torch_storage.StorageWriter):
    """Lets `torch.distributed.checkpoint.save` and `async_save` write this package's format.

    The checkpoint is complete or absent, every byte is under a checksum, and nothing in it is
    pickled. It is one that `save` could have written: `load`, `read`, `inspect` and the command
    line take it. Integer keys of dicts, which DCP turns into strings, are integers again.

    Args:
        path: where the checkpoint shall be: a path, or a URL of fsspec. `checkpoint_id` of
            `dcp.save` takes its place, so that one writer serves many saves.
        overwrite: replace the checkpoint that is there; it counts until the new one does.
        progress: called with (bytes written, bytes to write) of this rank.

    Raises:
        CheckpointError: from `dcp.save`, inside of its `CheckpointException`, on every rank; see
            `save`. Also for values that are neither tensors nor plain (numpy arrays, objects).

    As with every storage of DCP, plain tensors and values that differ between ranks are saved as
    one of the ranks has them. `save` tells, and keeps them apart in a `RankLocal`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        NextPath.__init__(self, path)
        self._overwrite, self._progress = overwrite, progress or silent
        # Of the save under way, on the coordinator; what a failed one has left, until the next.
        self._location: SaveLocation | None = None
        self._checksum = checksums.CRC32

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check what can be checked on every rank."""
        check_byte_order()
        if self._path is None:
            raise StateError("no path: StorageWriter(path), or dcp.save(..., checkpoint_id=path)")
        if not kwargs.get("use_collectives", True):
            raise StateError("use_collectives=False: ranks have to agree on one checkpoint")
        if self._location is not None:
            # A rank of the last save has failed while others still wrote. They do no longer.
            discard(self._storage, self._location)
            self._location = None

    def storage_meta(self) -> StorageMeta | None:
        """Tell the planner where this goes."""
        return StorageMeta(checkpoint_id=self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say which checksums this rank can compute."""
        return replace(plan, storage_data=checksums.fastest().name)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory that the ranks write in, and tell them (coordinator)."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            # The plans that ranks have kept name the directory of an earlier save.
            raise StateError("enable_plan_caching=True is not supported: leave it out")
        assert self._path is not None
        storage = self._storage
        self._checksum = checksums.agreed(str(plan.storage_data) for plan in plans)
        generation, target = new_generation(), resolve(self._path)
        location = SaveLocation(target, generation, storage.renames, self._overwrite)
        open_location(storage, location)
        self._location = location
        return [
            replace(plan, storage_data=Place(location, rank, self._checksum.name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's file."""
        place: Place = plan.storage_data
        work = _RankItems(plan, planner)
        done: Future[list[WriteResult]] = Future()
        job = WriteJob(
            storage=self._storage,
            directory=place.location.directory,
            rank=place.rank,
            shapes=work.shapes,
            checksum=checksums.named(place.checksum),
            tell=self._progress,
            data=work.data,
            done=lambda item: None,
        )
        items = as_one_file(work.items)
        written = RankRecords(write_data(job, [items] if items else []), work.values())
        # One result for each item, as DCP has it; the first carries what is known of all.
        results = [WriteResult(i.index, i.tensor_storage_size() or 0, None) for i in plan.items]
        done.set_result([replace(one, storage_data=written) for one in results[:1]] + results[1:])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit (coordinator)."""
        assert self._location is not None
        location, self._location = self._location, None
        parts = [one[0].storage_data for one in results if one]
        try:
            entries = metadata.state_dict_metadata
            paths = paths_of(metadata.planner_data, entries)
            values = {name: node for part in parts for name, node in part.values.items()}
            tensors = {
                tensor_name(paths[name]): (dtype_name(entry.properties.dtype), tuple(entry.size))
                for name, entry in entries.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            leaves = {
                path: values[name] if name in values else {"tensor": tensor_name(path)}
                for name, path in paths.items()
            }
            files = [part.files for part in parts]
            manifest = assembled(
                tensors, files, tree_of(leaves), self._checksum, world_size=len(results)
            )
            # As any reader will: a planner of others may have left gaps, or written twice.
            parse_manifest(manifest.to_bytes())
            commit(self._storage, location, manifest)
        except Exception:
            # All ranks have written: nobody is in that directory any more.
            discard(self._storage, location)
            raise

    @property
    def _storage(self) -> Storage:
        assert self._path is not None
        return storage_of(self._path)


class _RankItems:
    """The items of one rank's plan, as this package writes them."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._planner = planner
        self._paths = paths_of(plan.planner_data, {item.index.fqn for item in plan.items})
        self._plain = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        self.items: list[WriteItem] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._source: dict[str, list[tuple[Region, DcpItem]]] = {}
        for item in plan.items:
            if item.tensor_data is not None:
                self._add(item)

    def _add(self, item: DcpItem) -> None:
        assert item.tensor_data is not None
        chunk, name = item.tensor_data.chunk, tensor_name(self._paths[item.index.fqn])
        region = Region(tuple(chunk.offsets), tuple(chunk.sizes))
        dtype = dtype_name(item.tensor_data.properties.dtype)
        self.shapes[name] = tuple(item.tensor_data.size)
        if region.numel:  # what is empty has no chunk
            self.items.append(WriteItem(name, dtype, region))
            self._source.setdefault(name, []).append((region, item))

    def data(self, item: WriteItem) -> memoryview:
        """Return the bytes of an item, or of a part of one."""
        region, source = next(
            one for one in self._source[item.name] if intersect(one[0], item.region) == item.region
        )
        tensor = self._planner.resolve_data(source)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != region.shape:
            raise StateError(f"'{item.name}': the planner gave no tensor of {region.shape}")
        if dtype_name(tensor.dtype) != item.dtype:
            raise StateError(f"'{item.name}': planned as {item.dtype}, given as {tensor.dtype}")
        return bytes_of(narrow_to(tensor.detach(), region, item.region))

    def values(self) -> dict[str, Node]:
        """Return the nodes of plain values, which DCP hands over as what `torch.save` writes."""
        return {item.index.fqn: self._value(item) for item in self._plain}

    def _value(self, item: DcpItem) -> Node:
        name = item.index.fqn
        stored = self._planner.resolve_data(item)
        assert isinstance(stored, io.BytesIO)
        try:
            value = read_torch_file(stored.getvalue())
        except PickleRefusedError as error:
            raise StateError(f"at '{name}': not a plain value: {error}") from None
        flat = flatten({name: value}, 0)
        if flat.tensors:
            raise StateError(f"at '{name}': tensors inside a {type(value).__name__}: use a list")
        ((_, node),) = flat.tree["dict"]
        return node
