"""Layouts for the tensors of a sample, drawn by a seed, and DTensors in these layouts.

Both libraries are asked the same, in what stock DTensor has as well: `Replicate`, `Shard` of any
dim, even or not, and partial sums; on a line of four ranks and on a square of two by two. Ours is
asked in ragged and interleaved layouts, and with plain tensors among DTensors, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MESHES = {"line": (4,), "square": (2, 2)}


@dataclass(frozen=True)
class Scenario:
    """Layouts for all tensors of a sample.

    Attributes:
        kind: `sharded` (all along one dim of a line), `mixed` (each as it likes, partial sums
            too), `two axes` (mixed, on the square), or `own` (what only this package has).
        mesh: of `MESHES`.
        placements: per tensor, per mesh axis: `R`, `S0`, `S1`, …, or `P`; `own` ones also `G0`
            (ragged), `I0` (interleaved in two blocks), and `-` (a plain tensor).
        seed: for the local tensors of partial sums, and the units of ragged shards.
    """

    kind: str
    mesh: str
    placements: tuple[tuple[str, ...], ...]
    seed: int

    def __str__(self) -> str:
        words = " ".join("".join(axes) for axes in self.placements)
        return f"{self.mesh} [{words}]"


def scenarios(tensors: list[Tensor], chosen: random.Random) -> Iterator[Scenario]:
    """Draw layouts for the tensors of a sample."""
    dims = max((t.ndim for t in tensors), default=0)
    for dim in (0, -1, 1)[:dims]:
        placements = tuple((_of_dim(t, dim),) for t in tensors)
        yield Scenario("sharded", "line", placements, chosen.randrange(1 << 30))
    for kind, mesh in (("mixed", "line"), ("two axes", "square"), ("two axes", "square")):
        axes = len(MESHES[mesh])
        placements = tuple(tuple(_any_of(t, chosen) for _ in range(axes)) for t in tensors)
        yield Scenario(kind, mesh, placements, chosen.randrange(1 << 30))


def _of_dim(tensor: Tensor, dim: int) -> str:
    return f"S{dim % tensor.ndim}" if -tensor.ndim <= dim < tensor.ndim else "R"


def _any_of(tensor: Tensor, chosen: random.Random) -> str:
    shards = [f"S{dim}" for dim in range(tensor.ndim)] * 2
    return chosen.choice(["R", *shards, *(["P"] if can_be_partial(tensor) else [])])


def own_scenarios(tensors: list[Tensor], chosen: random.Random) -> Iterator[Scenario]:
    """Ways that stock DTensor does not have."""
    for mesh, sizes in MESHES.items():
        placements = [_own(t, len(sizes), chosen) for t in tensors]
        if all(p[0] == "-" for p in placements):
            placements[0] = ("R",) * len(sizes)
        yield Scenario("own", mesh, tuple(placements), chosen.randrange(1 << 30))


def _own(tensor: Tensor, axes: int, chosen: random.Random) -> tuple[str, ...]:
    if chosen.random() < 0.2:
        return ("-",) * axes
    found: list[str] = []
    for _ in range(axes):
        free = [d for d in range(tensor.ndim) if all(p[1:] != str(d) for p in found)]
        uneven = [f"G{d}" for d in free if tensor.shape[d]]
        blocks = [f"I{d}" for d in free if tensor.shape[d] and tensor.shape[d] % 2 == 0]
        # A shard within a ragged or interleaved one is no placement.
        taken = {p[1:] for p in found if p[0] in "GI"}
        other = _any_of(tensor, chosen)
        options = [*uneven, *blocks, *([] if other[1:] in taken and other[0] == "S" else [other])]
        found.append(chosen.choice(options or ["R"]))
    return tuple(found)


def can_be_partial(tensor: Tensor) -> bool:
    """Whether it can be split into a partial sum that adds up to it exactly."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.dtype in (torch.float32, torch.float64, torch.complex64):
        return bool(torch.isfinite(tensor).all() and (tensor.detach().abs() < 1e30).all())
    return tensor.dtype in (torch.int64, torch.int32)


def distributed(
    library: ModuleType, tensor: Tensor, mesh: Any, placements: tuple[str, ...], seed: int
) -> Tensor:
    """A DTensor of either library with this global value. No communication."""
    if placements[0] == "-":
        return tensor.detach().clone()
    value, most = tensor.detach().clone(), 2
    for axis, placement in enumerate(placements):
        if placement == "P":
            value = _partial(value, mesh.size(axis), mesh.get_local_rank(axis), seed + axis, most)
            # A second axis leaves all to one rank: 4x - 2x - 2x + x may be rounded.
            most = 1
    sizes = zip(placements, mesh.shape, strict=True)
    actual = [_placement(library, p, n, tensor.shape, seed) for p, n in sizes]
    local = library.distribute_tensor(value, mesh, actual, src_data_rank=None).to_local()
    meant = [library.Partial() if p == "P" else h for p, h in zip(placements, actual, strict=True)]
    return library.DTensor.from_local(  # type: ignore[no-any-return]
        local, mesh, meant, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _placement(library: ModuleType, word: str, count: int, shape: Any, seed: int) -> Any:
    if word[0] == "S":
        return library.Shard(int(word[1:]))
    if word[0] == "I":
        return library.InterleavedShard(int(word[1:]), 2)
    if word[0] == "G":
        extent, chosen = shape[int(word[1:])], random.Random(seed)
        marks = sorted(chosen.randint(0, extent) for _ in range(count - 1))
        units = [b - a for a, b in pairwise([0, *marks, extent])]
        return library.RaggedShard((int(word[1:]),), units)
    return library.Replicate()


def _partial(value: Tensor, count: int, rank: int, seed: int, most: int) -> Tensor:
    """A rank's part of a partial sum over `count` ranks, which is exact in any order of adding.

    Of each element one rank has twice the value, another its negative, and the others have 0; so no
    rank has the sum itself. With `most` 1, one rank has the value, and all others have 0.
    """
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, count, value.shape, generator=generator)
    second = (first + torch.randint(1, count, value.shape, generator=generator)) % count
    rest = (second == rank).to(value.dtype) * (most - 1)
    factor = (first == rank).to(value.dtype) * most - rest
    return value * factor
