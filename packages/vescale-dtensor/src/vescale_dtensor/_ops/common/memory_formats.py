"""Memory orders of operands, and of the results of kernels that keep the named formats alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from vescale_dtensor._layout.layout import Order
from vescale_dtensor._planning import OpCall, Strategy
from vescale_dtensor._planning.op_call import expanded_dims, memory_order

MEMORY_FORMATS = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}
"""The memory orders that torch has names for; a contiguous tensor's is None."""


def order_of_operand(call: OpCall, index: int = 0) -> Order | None:
    """The memory order of an operand."""
    return memory_order(call.operands[index])


def in_format_of_operand(call: OpCall, strategy: Strategy) -> Strategy:
    """With the memory order of kernels on the CPU that keep named formats, and no others.

    For those of which torch says something else where it has no data (see
    `_planning.memory_order`).
    """
    if call.operands[0].device.type != "cpu":
        return strategy
    order = order_of_operand(call)
    # What is expanded has no named format: these go by all strides.
    named = order in MEMORY_FORMATS.values() and not expanded_dims(call.operands[0])
    kept = order if named else None
    return replace(strategy, output_orders=(kept,))
