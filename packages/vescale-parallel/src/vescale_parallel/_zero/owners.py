"""Assigns whole tensors to ranks, balanced by what their steps cost. Pure."""

import math
from collections.abc import Sequence

from vescale_parallel._zero.flat_plan import FlatPlan, FlatSlot, SlotRequest


def step_cost(shape: Sequence[int]) -> int:
    """Return how an optimizer's step of a tensor grows with its shape.

    That of a matrix is the products of its orthogonalisation (Newton-Schulz: its Gram matrix, that
    squared, and back); of anything else it is its elements.
    """
    if len(shape) != 2:
        return math.prod(shape)
    small, large = sorted(shape)
    return 2 * small * small * large + small**3


def balanced_owners(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Return each tensor's owner: the most expensive first, to whoever has least to do by then.

    At most 4/3 of the best possible (Graham, 1969). Elements decide where costs are equal.
    """
    owners = [0] * len(shapes)
    load = [(0, 0, rank) for rank in range(ranks)]
    # A stable sort, and ranks in order: every rank finds the same owners.
    for index in sorted(range(len(shapes)), key=lambda i: -step_cost(shapes[i])):
        cost, elements, rank = min(load)
        owners[index] = rank
        shape = shapes[index]
        load[rank] = (cost + step_cost(shape), elements + math.prod(shape), rank)
    return owners


def plan_owned(
    wanted: Sequence[SlotRequest], owners: Sequence[int], shards: int, alignment: int = 1
) -> FlatPlan:
    """Lay tensors into a buffer in the order of their owners, each in full in its owner's shard.

    Args:
        wanted: the tensors.
        owners: the rank that owns each.
        shards: number of ranks; those that own nothing have an empty shard.
        alignment: slots and shards begin at multiples of so many elements.
    """
    slots: list[FlatSlot] = []
    sizes = []
    at = 0
    for rank in range(shards):
        start = at
        for one, owner in zip(wanted, owners, strict=True):
            if owner == rank:
                slots.append(FlatSlot(one.names, one.shape, max(one.numel, 1), at))
                at += -(-one.numel // alignment) * alignment
        sizes.append(at - start)
    return FlatPlan(tuple(slots), tuple(sizes))
