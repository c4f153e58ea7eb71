"""Collectives against raw torch.distributed and torch's functional ones: calls, bytes, errors.

Overheads are of one call on one process over torch's "fake" backend, which moves nothing; the rest
is measured in gloo processes, or counted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_comm import (
    Emulator,
    Group,
    all_gather,
    all_reduce,
    all_reduce_bucketed,
    group_of,
    reduce_scatter,
    trace,
)
from vescale_comm.testing import device_mesh, run

from tools.bench import Ratio

CALLS, TURNS = 100, 60
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure() -> Iterable[Ratio]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own older names
        yield from overheads()
    yield from bucketed()
    yield from fused()
    yield from compressed()


def overheads() -> Iterable[Ratio]:
    """Microseconds of one call on 64 bytes, where nothing is moved."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    group = group_of(mesh, "dp")
    torch_group = group.process_group
    x = torch.ones(16)
    stock = {
        "all_reduce": (DTensor.from_local(x, mesh, [Partial()]), [Replicate()]),
        "all_gather": (DTensor.from_local(x, mesh, [Shard(0)]), [Replicate()]),
        "reduce_scatter": (DTensor.from_local(x, mesh, [Partial()]), [Shard(0)]),
    }
    ours = {
        "all_reduce": lambda: all_reduce(x, group),
        "all_gather": lambda: all_gather(x, group),
        "reduce_scatter": lambda: reduce_scatter(x, group),
    }
    raw = {
        "all_reduce": lambda: dist.all_reduce(x.clone(), group=torch_group),
        "all_gather": lambda: gather_single(x.new_empty(64), x, group=torch_group),
        "reduce_scatter": lambda: scatter_single(x.new_empty(4), x, group=torch_group),
    }
    through = {
        "all_reduce": lambda: functional.all_reduce(x, "sum", torch_group),
        "all_gather": lambda: functional.all_gather_tensor(x, 0, torch_group),
        "reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, torch_group),
    }
    for name, call in ours.items():
        yield _call(f"{name}, call", call, raw[name], "dist.*, into new memory", 1.2)
        waited = _waited(through[name])
        yield _call(f"{name}, call", call, waited, "functional collective, waited")
        tensor, placements = stock[name]
        moved = _redistributed(tensor, placements)
        yield _call(f"{name}, call", call, moved, "stock DTensor redistribute", 0.5)
    dist.destroy_process_group()


def _waited(start: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: functional.wait_tensor(start())


def _redistributed(tensor: DTensor, placements: list) -> Callable[[], Tensor]:
    return lambda: functional.wait_tensor(tensor.redistribute(placements=placements).to_local())


def _call(
    name: str,
    ours: Callable[[], object],
    reference: Callable[[], object],
    against: str,
    goal: float | None = None,
) -> Ratio:
    # The least of many short turns: what it costs where nothing else runs on the machine.
    least = [float("inf"), float("inf")]
    for _ in range(TURNS):
        for which, call in enumerate((ours, reference)):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[which] = min(least[which], time.perf_counter() - start)
    scale = 1e6 / CALLS
    return Ratio(name, least[0] * scale, least[1] * scale, "us", against, goal=goal)


def bucketed() -> Iterable[Ratio]:
    """200 small tensors in few buffers, on 2 gloo ranks."""
    ours, reference = run(_bucketed, 2)[0]
    yield Ratio("200 tensors of 4 KB", ours * 1e3, reference * 1e3, "ms", "one by one", goal=0.5)


def _bucketed(rank: int, world_size: int) -> tuple[float, float]:
    tensors = [torch.ones(1024) for _ in range(200)]

    def one_by_one() -> None:
        for x in tensors:
            dist.all_reduce(x.clone())

    return _in_step(lambda: all_reduce_bucketed(tensors), one_by_one)


def fused() -> Iterable[Ratio]:
    """One all-reduce over two axes against one after the other, on 2 x 2 gloo ranks."""
    for name, numel in (("N-D all_reduce of 4 KB", 1024), ("N-D all_reduce of 4 MB", 2**20)):
        (ours, reference, fewer, more), *_ = run(_fused, 4, numel)
        yield Ratio(f"{name}, time", ours * 1e3, reference * 1e3, "ms", "axis by axis")
        yield Ratio(f"{name}, bytes", fewer, more, "bytes", "axis by axis", goal=1.0)


def _fused(rank: int, world_size: int, numel: int) -> tuple[float, float, int, int]:
    mesh = device_mesh((2, 2), ("dp", "tp"))
    both = group_of(mesh, ("dp", "tp"))
    axes: list[Group] = [group_of(mesh, "dp"), group_of(mesh, "tp")]
    x = torch.ones(numel)

    def axis_by_axis() -> Tensor:
        return all_reduce(all_reduce(x, axes[0]), axes[1])

    with trace() as one:
        all_reduce(x, both)
    with trace() as two:
        axis_by_axis()
    times = _in_step(lambda: all_reduce(x, both), axis_by_axis)
    return *times, one.bytes(), two.bytes()


def _in_step(ours: Callable[[], object], reference: Callable[[], object]) -> tuple[float, float]:
    """Medians of both, all ranks starting together."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for call, found in zip((ours, reference), times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return sorted(times[0])[4], sorted(times[1])[4]


def compressed() -> Iterable[Ratio]:
    """An all-reduce in a wire format: bytes against fp32, and its error against the stated one."""
    for wire in ("bf16", "fp8", "int8"):
        ours, reference = run(_bytes, 4, wire)[0]
        yield Ratio(f"{wire} all_reduce, bytes", ours, reference, "bytes", "fp32")
    xs = [torch.randn(2**16, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    exact = sum(x.double() for x in xs)
    error = (Emulator(4).all_reduce(xs, wire="int8")[0].double() - exact).abs().max().item()
    bound = (sum(x.abs().max() for x in xs) + exact.abs().max()).item() / 254
    yield Ratio("int8 all_reduce, error", error, bound * 1.02, "", "the stated bound", goal=1.0)


def _bytes(rank: int, world_size: int, wire: str) -> tuple[int, int]:
    x = torch.ones(2**16)
    with trace() as ours:
        all_reduce(x, wire=wire)
    with trace() as reference:
        all_reduce(x)
    return ours.bytes(), reference.bytes()
