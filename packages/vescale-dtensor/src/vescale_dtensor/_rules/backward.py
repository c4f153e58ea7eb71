"""Derivatives that torch has as operators of their own."""

from __future__ import annotations

from typing import Any

import torch

from vescale_dtensor._call import Call, Reads
from vescale_dtensor._plan import Rule
from vescale_dtensor._rules.along import whole
from vescale_dtensor._strategy import Signature, Strategy


def _of_softmax(call: Call) -> Strategy | None:
    """`_softmax_backward_data(grad_output, output, dim, input_dtype)`: along one dim."""
    alike = [operand.shape == call.operands[0].shape for operand in call.operands]
    if alike != [True, True] or call.kwargs:
        return None
    return whole(call, call.args[2], ("same",), others=lambda own: [own])


def _of_dropout(call: Call) -> Strategy | None:
    """`native_dropout_backward(grad_output, mask, scale)`."""
    alike = [operand.shape == call.operands[0].shape for operand in call.operands]
    if alike != [True, True] or call.kwargs:
        return None
    dims = tuple(range(call.operands[0].ndim))
    return Signature((dims, dims), (dims,), linear=((0,),), elementwise=True).strategy()


def _both(packet: Any) -> tuple[Any, Any]:
    return packet, packet.default


_READS = Reads.NUMBERS | Reads.SHAPES
RULES = {
    **{
        f: Rule("softmax", _of_softmax, _READS)
        for packet in (
            torch.ops.aten._softmax_backward_data,
            torch.ops.aten._log_softmax_backward_data,
        )
        for f in _both(packet)
    },
    **{
        f: Rule("softmax", _of_softmax, _READS)
        for f in (torch._softmax_backward_data, torch._log_softmax_backward_data)
    },
    **{
        f: Rule("dropout", _of_dropout, _READS)
        for f in _both(torch.ops.aten.native_dropout_backward)
    },
}
