"""Saves and loads on every rank in the benchmark `ckpt`, in turns with the others' ways."""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import time
import warnings
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tools.bench import in_turn
from tools.bench._ckpt_sides import Side, State, sides

ROWS, COLUMNS = 0, 1
LOADS = (("load", ROWS), ("load, resharded", COLUMNS))
BLOCKED = "async save, blocked"
Notes = dict[str, list[float]]


def save_and_load(
    rank: int, world_size: int, folder: str, count: int, extent: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds of each action by side, and the bytes that this rank read to load."""
    mesh, values = prepare(world_size, count, extent)
    chosen = sides()
    found: dict[str, Notes] = {name: {} for name in chosen}
    # Saved again and again, as in training: what stages keeps memory by the tensors it has seen.
    states = {name: side.make(values, mesh, ROWS) for name, side in chosen.items()}
    for turn in range(rounds + 1):
        for name in in_turn(chosen, turn):
            # The first turn only warms up.
            note = found[name] if turn else {}
            path = f"{folder}/{name}-{turn}"
            _one_turn(chosen[name], note, path, states[name], values, mesh)
    return {
        name: {what: statistics.median(numbers) for what, numbers in notes.items()}
        for name, notes in found.items()
    }


def prepare(world_size: int, count: int, extent: int) -> tuple[DeviceMesh, list[Tensor]]:
    """The mesh, and the same tensors on every rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    return mesh, [torch.rand(extent, extent, generator=generator) for _ in range(count)]


def destination(side: Side, values: list[Tensor], mesh: DeviceMesh, dim: int) -> State:
    """Tensors to load into, whose memory is there already: its first touch is nobody's cost."""
    into = side.make([torch.zeros_like(v) for v in values], mesh, dim)
    for tensor in into.values():
        tensor.to_local().fill_(-1)
    return into


def _one_turn(
    side: Side, note: Notes, path: str, state: State, values: list[Tensor], mesh: DeviceMesh
) -> None:
    _note(note, "save", lambda: side.save(path, state))
    for what, dim in LOADS if side.reshards else LOADS[:1]:
        into = destination(side, values, mesh, dim)
        _note(note, what, lambda into=into: side.load(path, into))  # type: ignore[misc]
        _check(into, values, dim, mesh)
    if side.begin_save is not None:
        _blocked(side.begin_save, note, f"{path}-async", state)
    dist.barrier()
    if mesh.get_local_rank() == 0:
        for left in (path, f"{path}-async"):
            shutil.rmtree(left, ignore_errors=True)
        os.sync()  # what one leaves to the disk is not the next one's to wait for
    dist.barrier()


def _note(note: Notes, what: str, action: Callable[[], object]) -> None:
    dist.barrier()
    began, read = time.perf_counter(), _bytes_read()
    action()
    note.setdefault(f"{what}: bytes", []).append(_bytes_read() - read)
    dist.barrier()
    note.setdefault(what, []).append(time.perf_counter() - began)


def _blocked(
    begin_save: Callable[[str, State], Callable[[], object]], note: Notes, path: str, state: State
) -> None:
    """How long the caller is kept; then wait for the rest of it."""
    dist.barrier()
    began = time.perf_counter()
    wait = begin_save(path, state)
    note.setdefault(BLOCKED, []).append(time.perf_counter() - began)
    wait()
    dist.barrier()


def checksum_seconds(nbytes: int) -> float:
    """How long the checksums of that many bytes take, in blocks as they are computed."""
    checksum: Callable[[memoryview], object] = zlib.crc32
    if find_spec("xxhash") is not None:
        checksum = import_module("xxhash").xxh3_64_hexdigest
    data = memoryview(bytearray(1 << 18))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(nbytes >> 18):
            checksum(data)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _bytes_read() -> int:
    """Bytes that this process has asked files for (Linux counts them)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def _check(into: State, values: list[Tensor], dim: int, mesh: DeviceMesh) -> None:
    for loaded, value in zip(into.values(), values, strict=True):
        expected = value.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        local: Any = loaded.to_local()
        if not torch.equal(local, expected):
            raise AssertionError("what was loaded is not what was saved")
