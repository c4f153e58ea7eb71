"""Operations on a mesh of any number of ranks, in one process on torch's fake process group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import vescale_dtensor as vd
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_dtensor import Partial, Replicate, Shard

ROWS = 2  # of each rank's local tensor, so that what a rank holds does not grow


def mesh_of(world: int) -> vd.DeviceMesh:
    """Make the fake process group and a mesh of two axes, as nearly square as powers of 2 go."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)  # type: ignore[no-untyped-call]
    inner = 1 << (world.bit_length() - 1) // 2
    return vd.init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("x", "y"))


def operations(mesh: vd.DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each (name, call) of which no part that is ours should grow with the mesh.

    What is gathered grows, and with it the fake group's copies: in gathers, and where ranks tell
    each other a row (`cumsum`, `softmax`, `argmax`, …). So does what a CPU generator passes over
    in a dropout: the numbers of all ranks.
    """
    outer, inner = mesh.shape
    rows, columns = ROWS * inner, ROWS * outer
    block = vd.DTensor.from_local(torch.ones(rows, columns), mesh, [Shard(0), Shard(1)])
    lines = vd.DTensor.from_local(torch.ones(ROWS, 4), mesh, [Shard(0), Shard(0)])
    grid = vd.DTensor.from_local(torch.ones(ROWS, ROWS), mesh, [Shard(0), Shard(1)])
    terms = vd.DTensor.from_local(torch.ones(ROWS, 4), mesh, [Partial(), Partial()])
    weight = vd.DTensor.from_local(torch.ones(8, 4), mesh, [Replicate(), Replicate()])
    local, places = torch.ones(ROWS, 4), torch.tensor([0, 5, ROWS])
    yield "swap two axes", lambda: block.redistribute(mesh, [Shard(1), Shard(0)])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    parts, part = torch.empty(ROWS * mesh.size(), 4), torch.ones(ROWS, 4)
    yield "gather, torch alone", lambda: gather(parts, part)
    yield "gather", lambda: lines.redistribute(mesh, [Replicate(), Replicate()])
    yield "gather a grid", lambda: grid.redistribute(mesh, [Replicate(), Replicate()])
    yield "reduce", lambda: terms.redistribute(mesh, [Replicate(), Replicate()])
    wide = vd.DTensor.from_local(torch.ones(columns, 4), mesh, [Partial(), Replicate()])
    yield "reduce and scatter", lambda: wide.redistribute(mesh, [Shard(0), Replicate()])
    yield "from_local", lambda: vd.DTensor.from_local(local, mesh, [Shard(0), Shard(0)])
    yield "add", lambda: lines + lines
    yield "sum", lambda: lines.sum()
    yield "linear", lambda: torch.nn.functional.linear(lines, weight)
    yield "cumsum", lambda: lines.cumsum(0)
    yield "softmax", lambda: lines.softmax(0)
    yield "dropout", lambda: torch.nn.functional.dropout(lines, 0.5)
    yield "slice", lambda: lines[3:-5]
    yield "one index", lambda: lines[ROWS]
    yield "assignment", lambda: operator.setitem(lines, slice(3, -5), 0.0)
    yield "split", lambda: lines.split(lines.shape[0] // 2)
    yield "argmax", lambda: lines.argmax(0)
    yield "cummax", lambda: lines.cummax(0)
    yield "topk", lambda: lines.topk(3, 0)
    yield "tril", lambda: grid.tril()
    yield "index_select", lambda: lines.index_select(0, places)
    yield "cat", lambda: torch.cat([lines, lines])
    yield "sort", lambda: lines.sort(0)
    yield "median", lambda: lines.median(0)
    yield "flip", lambda: lines.flip(0)
    yield "repr", lambda: repr(lines)
