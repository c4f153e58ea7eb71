"""What every rank does in the benchmark `ckpt`: save and load by vescale_ckpt and by torch."""

from __future__ import annotations

import logging
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
import vescale_ckpt
import vescale_dtensor
from torch import Tensor
from torch.distributed import tensor as stock
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROWS, COLUMNS = 0, 1
State = dict[str, Any]


def ours(values: list[Tensor], mesh: DeviceMesh, dim: int) -> State:
    """Tensors of vescale_dtensor, sharded on `dim`."""
    placements = [vescale_dtensor.Shard(dim)]
    return _named(vescale_dtensor.distribute_tensor(v, mesh, placements) for v in values)


def theirs(values: list[Tensor], mesh: DeviceMesh, dim: int) -> State:
    """Tensors of torch's DTensor, sharded on `dim`."""
    return _named(stock.distribute_tensor(v, mesh, [stock.Shard(dim)]) for v in values)


def _named(tensors: Any) -> State:
    return {f"layer.{i}.weight": tensor for i, tensor in enumerate(tensors)}


_SIDES: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "ours": (ours, vescale_ckpt.save, vescale_ckpt.load),
    "stock": (
        theirs,
        lambda path, state: state_dict_saver.save(state, checkpoint_id=path),
        lambda path, into: state_dict_loader.load(into, checkpoint_id=path),
    ),
}


def save_and_load(
    rank: int, world_size: int, folder: str, count: int, extent: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds of each action by side, and the bytes that this rank read to load."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(extent, extent, generator=generator) for _ in range(count)]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in _SIDES}
    state = {"staging": vescale_ckpt.Staging()}
    for turn in range(rounds + 1):
        for name, (make, save, load) in _SIDES.items():
            path = f"{folder}/{name}-{turn}"
            note = found[name] if turn else {}  # the first turn only warms up
            _note(note, "save", save, path, make(values, mesh, ROWS))
            for what, dim in (("load", ROWS), ("load, resharded", COLUMNS)):
                into = make([torch.zeros_like(v) for v in values], mesh, dim)
                _note(note, what, load, path, into)
                _check(into, values, dim, mesh)
            _async_save(name, note, f"{path}-async", make(values, mesh, ROWS), state)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
                shutil.rmtree(f"{path}-async")
    return {
        name: {what: statistics.median(numbers) for what, numbers in notes.items()}
        for name, notes in found.items()
    }


def _note(note: dict[str, list[float]], what: str, action: Callable[..., Any], *args: Any) -> None:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    began, read = time.perf_counter(), _bytes_read()
    action(*args)
    note.setdefault(f"{what}: bytes", []).append(_bytes_read() - read)
    note.setdefault(f"{what}: memory", []).append(_memory("VmHWM") - before)
    dist.barrier()
    note.setdefault(what, []).append(time.perf_counter() - began)


def _async_save(
    name: str, note: dict[str, list[float]], path: str, values: State, shared: dict[str, Any]
) -> None:
    """How long the caller is blocked; then wait, and see that it is the state of before."""
    dist.barrier()
    began = time.perf_counter()
    if name == "ours":
        handle = vescale_ckpt.async_save(path, values, staging=shared["staging"])
        wait = handle.wait
    else:
        # A future, as no asynchronous staging was asked for.
        future: Any = state_dict_saver.async_save(values, checkpoint_id=path)
        wait = future.result
    note.setdefault("async save, blocked", []).append(time.perf_counter() - began)
    wait()
    dist.barrier()


def _memory(what: str) -> int:
    """Bytes of memory of this process, now or at most (Linux tells)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


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
        if not torch.equal(loaded.to_local(), expected):
            raise AssertionError("what was loaded is not what was saved")
