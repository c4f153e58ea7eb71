"""Makes the layouts that `check_rule` tries, and DTensors in these layouts.

These are all combinations of what each operand can be on each mesh axis: replicated, sharded on
each dim, sharded unevenly with an empty shard, or partial. If there are too many, some are drawn,
such that every operand still has every placement on every axis at least once.
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
from vescale_dtensor._layout.placement_base import Placement
from vescale_dtensor._layout.placements import Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._layout.spec import order_of
from vescale_dtensor._tensor.dtensor import DTensor

Placements = tuple[Placement, ...]  # of one operand: one per mesh axis
Combination = tuple[Placements, ...]  # one per operand

# Partial values are split by multiples of 1/8. In floating point their sums are exact, if the
# values are such multiples too, so a comparison need not tolerate them.
GRID = 8


def options_for(x: Tensor, count: int) -> list[Placement]:
    """The placements that `x` can have on a mesh axis of `count` coordinates, simplest first."""
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

    They depend on the extent alone, so that dims of different operands that have to match (the
    contracted dims of a product) are sharded alike.
    """
    later = extent // count
    return (0, *[later] * (count - 2), extent - later * (count - 2))


def combinations(
    operands: Sequence[Tensor], sizes: Sequence[int], most: int, seed: int
) -> tuple[list[Combination], int]:
    """At most about `most` combinations of placements, simplest first, and how many there are.

    Args:
        operands: the tensors of a sample.
        sizes: of the mesh axes.
        most: how many to return; more if it takes more to cover every placement of every operand.
        seed: determines which are drawn.
    """
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
    """All placements that one operand can have on a mesh."""
    each = product(*[options_for(x, count) for count in sizes])
    return [placements for placements in each if _fit_together(placements)]


def _fit_together(placements: Placements) -> bool:
    """Whether no other axis shards a dim that is sharded unevenly: its units sum to the extent."""
    dims = [p.dim for p in placements if isinstance(p, Shard | RaggedShard)]
    uneven = [p.dim for p in placements if isinstance(p, RaggedShard)]
    return all(dims.count(dim) == 1 for dim in uneven)


def _covering(choices: list[list[Placements]], chosen: random.Random) -> Iterator[Combination]:
    """Combinations in which each operand has each placement on each axis at least once."""
    # Shuffled, so that operands do not get the same placement each time. Cycling through the
    # placements of all operands together covers each, in as many steps as the longest list has.
    shuffled = [chosen.sample(each, len(each)) for each in choices]
    for axis in range(len(choices[0][0])):
        alone = [list({each[axis]: each for each in one}.values()) for one in shuffled]
        for index in range(max(map(len, alone))):
            yield tuple(each[index % len(each)] for each in alone)


def _complexity(combination: Combination) -> int:
    """How far a layout is from replicated, to report the simplest one that fails."""
    ranks = {Replicate: 0, Shard: 1, Partial: 2, RaggedShard: 3}
    return sum(ranks[type(p)] for placements in combination for p in placements)


def spread(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], generator: torch.Generator
) -> DTensor:
    """A DTensor with the global value `x`, made without communication.

    Args:
        x: the global value, equal on all ranks.
        mesh: the mesh.
        placements: one per mesh axis.
        generator: draws partial values. It must have the same state on every rank, as the values
            of all ranks have to sum to `x`.
    """
    layout = Layout.of(mesh, placements, order_of(tuple(x.shape), x.stride()))
    # Partial first, on the global value: every rank then draws the same numbers, whatever shard it
    # holds.
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
    """This rank's partial value: all coordinates but 0 have noise, and coordinate 0 the rest."""
    count = layout.sizes[axis]
    drawn = [
        torch.randint(-GRID, GRID + 1, value.shape, generator=generator, device="cpu")
        for _ in range(count - 1)
    ]
    grid = GRID if value.is_floating_point() or value.is_complex() else 1
    noise = [(each / grid).to(value.dtype).to(value.device) for each in drawn]
    whole = value * count if placement.reduce_op == "avg" else value
    return [whole - sum(noise), *noise][layout.coordinate[axis]]
