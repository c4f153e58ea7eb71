"""Complex numbers and their parts: every dim may be sharded, but for the pair of parts."""

from __future__ import annotations

from typing import Any

from vescale_dtensor._ops.common.functions import entries, getter
from vescale_dtensor._ops.common.letters import broadcast_letters, letters
from vescale_dtensor._ops.common.memory_formats import order_of_operand
from vescale_dtensor._planning import OpCall, Reads, Rule, Signature, Strategy


def _part(call: OpCall) -> Strategy:
    """`conj`, `real`, `imag`: views, and linear over the real numbers."""
    dims = letters(call.operands[0].ndim)
    orders = (order_of_operand(call),)
    return Signature(
        (dims,), (dims,), linear=((0,),), elementwise=True, output_orders=orders
    ).strategy()


def _as_pairs(call: OpCall) -> Strategy:
    """`view_as_real`: adds a last dim of the two parts, which stays unsharded."""
    ndim = call.operands[0].ndim
    dims = letters(ndim)
    order = order_of_operand(call)
    orders = (None if order is None else (*order, ndim),)
    # Element by element: what is flat on this rank stays so, in front of the pair.
    how: Any = {"linear": ((0,),), "elementwise": True, "output_orders": orders}
    return Signature((dims,), ((*dims, None),), **how).strategy()


def _of_pairs(call: OpCall) -> Strategy | None:
    """`view_as_complex`."""
    ndim = call.operands[0].ndim
    if ndim == 0 or order_of_operand(call) is not None:
        return None  # torch checks on the global tensor that the pair is adjacent in memory
    dims = letters(ndim - 1)
    pairs = (*dims, None)
    return Signature((pairs,), (dims,), linear=((0,),), elementwise=True).strategy()


def _two_parts(call: OpCall) -> Strategy:
    """`frexp`: mantissa and exponent."""
    (dims,), _ = broadcast_letters(call.shapes())
    return Signature((dims,), (dims, dims)).strategy()


RULES = {
    **entries("conj resolve_conj resolve_neg real imag", Rule("complex", _part, views=True)),
    getter("real"): Rule("complex", _part, views=True),
    getter("imag"): Rule("complex", _part, views=True),
    **entries("view_as_real", Rule("complex", _as_pairs, views=True)),
    **entries("view_as_complex", Rule("complex", _of_pairs, Reads.NUMBERS, views=True)),
    **entries("frexp", Rule("frexp", _two_parts)),
}
