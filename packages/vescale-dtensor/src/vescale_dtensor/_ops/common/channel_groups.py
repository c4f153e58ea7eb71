"""Groups of channels that belong together: shards that leave every group on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vescale_dtensor._layout.derived_placements import split_of
from vescale_dtensor._layout.placement_base import Placement, Sharded
from vescale_dtensor._layout.placements import Replicate, is_interval
from vescale_dtensor._planning import AxisStrategy, OpCall
from vescale_dtensor._tensor.dtensor import DTensor

_REPLICATE = Replicate()


def group_candidates(
    call: OpCall, channels: Sequence[int | None], result: tuple[int, int], groups: int
) -> tuple[tuple[AxisStrategy, ...], ...]:
    """For each mesh axis, the candidate that shards between groups, if an operand is sharded so.

    Args:
        call: the call; every operand has so many channels in each group.
        channels: per operand, its dim of channels, or None if it has none.
        result: the result's dim of channels, and its extent.
        groups: number of groups.
    """
    mesh = next(o._spec.layout for o in call.operands if isinstance(o, DTensor))
    for operand, dim in zip(call.operands, channels, strict=True):
        for axis, count in enumerate(mesh.sizes):
            units = None if dim is None else _units(operand, dim, axis, count, groups)
            if units is not None:
                # On one axis only: a second axis would shard again inside what the first one left,
                # where group boundaries are other ones.
                row = _candidate(call, channels, result, units)
                return tuple((row,) if a == axis else () for a in range(len(mesh.sizes)))
    return ()


def _candidate(
    call: OpCall, channels: Sequence[int | None], result: tuple[int, int], units: tuple[int, ...]
) -> AxisStrategy:
    """The candidate in which each coordinate has so many groups; operands differ in their width."""
    groups = sum(units)
    inputs: list[Placement] = []
    for operand, dim in zip(call.operands, channels, strict=True):
        if dim is None:
            inputs.append(_REPLICATE)
        else:
            inputs.append(_shard(dim, operand.shape[dim] // groups, units))
    dim, extent = result
    return AxisStrategy(
        tuple(inputs), (_shard(dim, extent // groups, units),), fixed_placement=True
    )


def _shard(dim: int, each: int, units: Sequence[int]) -> Placement:
    return split_of(dim, [each * unit for unit in units])


def _units(operand: Tensor, dim: int, axis: int, count: int, groups: int) -> tuple[int, ...] | None:
    """How many groups each coordinate has; None if this axis does not shard between groups."""
    if not isinstance(operand, DTensor):
        return None
    placements = operand._spec.layout.placements
    shard = placements[axis]
    if not isinstance(shard, Sharded) or shard.cut_dims() != (dim,) or not is_interval(shard):
        return None
    # Sizes are only those of the global dim if no other axis shards it.
    if sum(isinstance(p, Sharded) and dim in p.cut_dims() for p in placements) > 1:
        return None
    each = operand.shape[dim] // groups
    sizes = shard.sizes(operand.shape[dim], count)
    if any(size % each for size in sizes):
        return None
    # Zero for a coordinate without groups, to which `pad_empty_shards` gives a stand-in.
    return tuple(size // each for size in sizes)
