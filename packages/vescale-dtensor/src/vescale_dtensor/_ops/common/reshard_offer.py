"""Candidates that reshard to another dim, where an operation needs the sharded dim unsharded.

They replace an all-gather by an all-to-all, which sends less.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_dtensor._layout.placement_base import Sharded
from vescale_dtensor._layout.placements import Shard
from vescale_dtensor._planning import AxisStrategy, OpCall, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


def offer_reshard(call: OpCall, strategy: Strategy) -> Strategy:
    """The strategy, with a candidate more for each axis whose shard of operand 0 none accepts.

    It shards the largest dim that no axis shards and that has an index for every coordinate. The
    rule has to read shapes.
    """
    operand = call.operands[0]
    if not isinstance(operand, DTensor):
        return strategy
    shape = tuple(operand.shape)
    layout = operand._spec.layout
    free = {
        row.inputs[0].dim: row for row in strategy.candidates if isinstance(row.inputs[0], Shard)
    }
    shards = [p for p in layout.placements if isinstance(p, Sharded)]
    sharded = {dim for shard in shards for dim in shard.cut_dims()}
    offers: list[tuple[AxisStrategy, ...]] = []
    for placement, count in zip(layout.placements, layout.sizes, strict=True):
        stopped = isinstance(placement, Sharded) and not free.keys() >= set(placement.cut_dims())
        candidates = [d for d in free if d not in sharded and shape[d] >= count] if stopped else []
        if candidates:
            dim = max(candidates, key=shape.__getitem__)
            sharded.add(dim)
            offers.append((replace(free[dim], fixed_placement=True, proactive=True),))
        else:
            offers.append(())
    return replace(strategy, axis_candidates=tuple(offers))
