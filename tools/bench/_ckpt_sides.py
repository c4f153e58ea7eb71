"""Defines the sides of the benchmark `ckpt`, each in its own way to save and load."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
import vescale_ckpt
import vescale_dtensor
from torch import Tensor
from torch.distributed import tensor as stock
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh

State = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One way to save and load; `begin_save` returns what waits for an asynchronous save."""

    make: Callable[[list[Tensor], DeviceMesh, int], State]
    save: Callable[[str, State], object]
    load: Callable[[str, State], object]
    begin_save: Callable[[str, State], Callable[[], object]] | None = None
    # Whether it loads into another layout without being told of the one that was saved.
    reshards: bool = True


def sides() -> dict[str, Side]:
    """All that are installed, by name."""
    staging = vescale_ckpt.Staging()
    ours = Side(
        make=_ours,
        save=lambda path, state: vescale_ckpt.save(path, state),
        load=lambda path, into: vescale_ckpt.load(path, into),
        begin_save=lambda path, state: vescale_ckpt.async_save(path, state, staging=staging).wait,
    )
    found = {"ours": ours, "stock": _dcp()}
    if find_spec("xxhash") is not None:
        found["crc32"] = Side(make=_ours, save=_crc32_save, load=ours.load)
    if find_spec("torch_checkpointing") is not None:
        found["rival"] = _rival()
    return found


def _ours(values: list[Tensor], mesh: DeviceMesh, dim: int) -> State:
    placements = [vescale_dtensor.Shard(dim)]
    return _named(vescale_dtensor.distribute_tensor(v, mesh, placements) for v in values)


def _stock(values: list[Tensor], mesh: DeviceMesh, dim: int) -> State:
    return _named(stock.distribute_tensor(v, mesh, [stock.Shard(dim)]) for v in values)


def _named(tensors: Any) -> State:
    return {f"layer_{i}": tensor for i, tensor in enumerate(tensors)}


def _dcp() -> Side:
    """DCP as its documentation advises: buffers of one stager, kept plans, threads as ours has."""
    nothing = StagingOptions(False, False, False, False)  # what needs an accelerator, and threads
    stager = DefaultStager(nothing)
    threads = max(1, (os.cpu_count() or 1) // dist.get_world_size())

    def words(path: str) -> dict[str, Any]:
        writer = FileSystemWriter(path, thread_count=threads)
        return {"storage_writer": writer, "planner": DefaultSavePlanner(enable_plan_caching=True)}

    def save(path: str, state: State) -> None:
        state_dict_saver.save(state, **words(path))

    def begin(path: str, state: State) -> Callable[[], object]:
        future: Any = state_dict_saver.async_save(state, async_stager=stager, **words(path))
        return lambda: future.result()

    return Side(_stock, save, _dcp_load, begin)


def _dcp_load(path: str, into: State) -> None:
    state_dict_loader.load(into, checkpoint_id=path)


def _crc32_save(path: str, state: State) -> None:
    with _without_xxhash():
        vescale_ckpt.save(path, state)


@contextmanager
def _without_xxhash() -> Iterator[None]:
    # How Python itself marks what shall not be importable.
    module = import_module("xxhash")
    sys.modules["xxhash"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules["xxhash"] = module


def _rival() -> Side:
    rival = import_module("torch_checkpointing")
    storage = import_module("torch_checkpointing.storage.filesystem")
    config = rival.CheckpointManager.Config(
        save=rival.SyncCheckpointSaverConfig(),
        # Its direct I/O writes unaligned ends, which ext4 refuses.
        storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = rival.CheckpointManager(config)

    def save(path: str, state: State) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        manager.save(path, state)
        # It returns on some ranks before the checkpoint is there.
        dist.barrier()

    return Side(_stock, save, lambda path, into: manager.load(path, into=into), reshards=False)
