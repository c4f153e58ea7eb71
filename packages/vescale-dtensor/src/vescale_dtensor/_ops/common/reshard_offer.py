"""Candidates that move a shard to another dim, where an operation needs the sharded dim unsharded.

An all-to-all sends less than the gather it replaces.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_dtensor._layout.placements import Shard, Sharded
from vescale_dtensor._planning import AxisStrategy, OpCall, Strategy
from vescale_dtensor._tensor.dtensor import DTensor


def offer_reshard(call: OpCall, strategy: Strategy) -> Strategy:
    """The strategy, with an offer for each axis whose cut of operand 0 no row takes.

    The dim it goes to is the largest that no axis cuts, and has something for every coordinate.
    Reads shapes.
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
    sharded = {dim for cut in shards for dim in cut.cut_dims()}
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
