"""Derivatives of softmax, which torch has as operators of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from vescale_dtensor._ops.common.unsharded_dims import unsharded_dims_strategy
from vescale_dtensor._planning import OpCall, Reads, Rule, Strategy


def _of_softmax(call: OpCall) -> Strategy | None:
    """`_softmax_backward_data(grad_output, output, dim, input_dtype)`: along one dim."""
    alike = [operand.shape == call.operands[0].shape for operand in call.operands]
    if alike != [True, True] or call.kwargs:
        return None
    found = unsharded_dims_strategy(call, call.args[2], ("same",), others=lambda own: [own])
    # Torch's result is row-major, whatever the operands' order.
    return found and replace(found, output_orders=(None,))


_LOGARITHM = torch.ops.aten._log_softmax_backward_data
RULES = {
    f: Rule("softmax", _of_softmax, Reads.NUMBERS | Reads.SHAPES)
    for f in (
        _LOGARITHM,
        _LOGARITHM.default,
        torch._softmax_backward_data,
        torch._log_softmax_backward_data,
    )
}
