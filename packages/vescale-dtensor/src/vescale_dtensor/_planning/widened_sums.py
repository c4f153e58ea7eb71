"""Integer sums that are still spread over ranks: only what gives the same dtype is done with them.

A sum of integers wraps around in its own dtype, and that of booleans is "or": a wider dtype would
count what every rank has. Of bool partial sums [True] and [True], times 3 is 3, not 3 + 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.placements import Partial
from vescale_dtensor._planning.memory_order import views_on_one_device
from vescale_dtensor._planning.op_call import OpCall
from vescale_dtensor._planning.strategy import AxisStrategy, Strategy

# One of the ranks' values, in any dtype.
_EXACT = ("max", "min")


def without_widened_sums(
    strategy: Strategy, call: OpCall, actual: Sequence[Layout], writes: int | None
) -> Strategy:
    """The strategy without the candidates that would widen an integer sum before ranks add it.

    Args:
        strategy: what a rule returned.
        call: the parsed call.
        actual: layouts of its operands.
        writes: index of the operand that is changed in place, which is then the result.
    """
    spread = [
        operand
        for operand, layout in zip(call.operands, actual, strict=True)
        if any(isinstance(p, Partial) for p in layout.placements) and is_integer(operand.dtype)
    ]
    if not spread:
        return strategy
    # The sums of ranks are integers modulo the size of the dtype, with + and * of that ring.
    results = (views_on_one_device(call) or ()) if writes is None else [call.operands[writes]]
    known = {result.dtype for result in results}

    def keeps(candidate: AxisStrategy) -> bool:
        return all(
            known == {operand.dtype}
            for operand, placement in zip(call.operands, candidate.inputs, strict=True)
            if isinstance(placement, Partial)
            and placement.reduce_op not in _EXACT
            and is_integer(operand.dtype)
        )

    return replace(
        strategy,
        candidates=tuple(filter(keeps, strategy.candidates)),
        axis_candidates=tuple(tuple(filter(keeps, each)) for each in strategy.axis_candidates),
    )


def is_integer(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype are integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)
