"""Which layouts `check_rule` tries, and DTensors that lie in them.

All combinations of what each operand can be along each mesh axis: replicated, sharded along each of
its dims, along one unevenly with a coordinate that gets nothing, or partial. Where those are too
many, a seed picks some, so that every operand still has every placement on every axis once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor._autograd.conversion import from_local
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import box_of
from vescale_dtensor._layout.placements import Partial, Placement, RaggedShard, Replicate, Shard
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._tensor.dtensor import DTensor

Placements = tuple[Placement, ...]  # of one operand: one per mesh axis
Combination = tuple[Placements, ...]  # one per operand

GRID = 8  # terms are multiples of 1/8, so that sums of them are exact where the values are, too


def options_for(x: Tensor, count: int) -> list[Placement]:
    """What `x` can be along a mesh axis of `count` coordinates, simplest first."""
    options: list[Placement] = [Replicate(), *map(Shard, range(x.ndim))]
    options += [
        RaggedShard((dim,), uneven_units(extent, count))
        for dim, extent in enumerate(x.shape)
        if extent and count > 1
    ]
    if x.dtype is not torch.bool:
        options.append(Partial())
    if x.is_floating_point() or x.is_complex():
        options.append(Partial("avg"))
    return options


def uneven_units(extent: int, count: int) -> tuple[int, ...]:
    """How many indices each coordinate gets: the first none, the last most.

    They follow from the extent alone, so that dims that belong together are sharded alike.
    """
    later = extent // count
    return (0, *[later] * (count - 2), extent - later * (count - 2))


def combinations(
    operands: Sequence[Tensor], sizes: Sequence[int], most: int, seed: int
) -> tuple[list[Combination], int]:
    """At most about `most` combinations of placements, simplest first; and how many there are."""
    choices = [_placements_of(x, sizes) for x in operands]
    total = prod(map(len, choices))
    if total <= most:
        return sorted(product(*choices), key=_complexity), total
    chosen = random.Random(seed)
    found = dict.fromkeys(_covering(choices, chosen))
    while len(found) < most:
        found[tuple(chosen.choice(each) for each in choices)] = None
    return sorted(found, key=_complexity), total


def _placements_of(x: Tensor, sizes: Sequence[int]) -> list[Placements]:
    each = product(*[options_for(x, count) for count in sizes])
    return [placements for placements in each if _fit_together(placements)]


def _fit_together(placements: Placements) -> bool:
    """Units of an uneven shard say what a whole dim has: no other axis may shard it as well."""
    dims = [p.dim for p in placements if isinstance(p, Shard | RaggedShard)]
    uneven = [p.dim for p in placements if isinstance(p, RaggedShard)]
    return all(dims.count(dim) == 1 for dim in uneven)


def _covering(choices: list[list[Placements]], chosen: random.Random) -> Iterator[Combination]:
    """Combinations in which each operand has each placement on each axis at least once."""
    shuffled = [chosen.sample(each, len(each)) for each in choices]
    for axis in range(len(choices[0][0])):
        alone = [list({each[axis]: each for each in one}.values()) for one in shuffled]
        for index in range(max(map(len, alone))):
            yield tuple(each[index % len(each)] for each in alone)


def _complexity(combination: Combination) -> int:
    """How far from replicated: who reads a failure wants the simplest layout that shows it."""
    ranks = {Replicate: 0, Shard: 1, Partial: 2, RaggedShard: 3}
    return sum(ranks[type(p)] for placements in combination for p in placements)


def spread(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], generator: torch.Generator
) -> DTensor:
    """A DTensor that means `x`; terms of partial ones are drawn, the same on every rank.

    Args:
        x: the whole, equal on all ranks.
        mesh: the mesh.
        placements: one per mesh axis.
        generator: at the same place on every rank.
    """
    layout = Layout.of(mesh, placements, order_of(tuple(x.shape), x.stride()))
    value = x.detach()
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            value = _term(value, placement, axis, layout, generator)
    for dim, (low, high) in enumerate(box_of(layout, tuple(x.shape), layout.coordinate)):
        value = value.narrow(dim, low, high - low)
    return from_local(
        value.detach().clone(), mesh, layout.placements, shape=tuple(x.shape), stride=x.stride()
    )


def _term(
    value: Tensor, placement: Partial, axis: int, layout: Layout, generator: torch.Generator
) -> Tensor:
    """This rank's term of a value: those of the others are small numbers of a grid."""
    count = layout.sizes[axis]
    drawn = [
        torch.randint(-GRID, GRID + 1, value.shape, generator=generator) for _ in range(count - 1)
    ]
    grid = GRID if value.is_floating_point() or value.is_complex() else 1
    noise = [(each / grid).to(value.dtype).to(value.device) for each in drawn]
    whole = value * count if placement.reduce_op == "avg" else value
    return [whole - sum(noise), *noise][layout.coordinate[axis]]
