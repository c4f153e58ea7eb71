"""Chooses the table of compiled calls by what autograd makes of the operands.

Asked at each call, so most of these are written out for a number of operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vescale_dtensor._autograd.local_use import join_hidden_node, local_outside_autograd
from vescale_dtensor._fast_path.cache import GRAD_IDLE, GRAD_RECORDED, NO_GRAD, CallTable
from vescale_dtensor._tensor.dtensor import DTensor
from vescale_dtensor._torch.compat import any_requires_grad, forward_grad_enabled

is_grad_enabled = torch.is_grad_enabled

NO_TABLE = CallTable()
"""Always empty: a lookup in it misses, and who makes the call joins the hidden node first."""


def table_for_operand(first: DTensor) -> CallTable:
    """The table for a call of one DTensor; an empty one if it may have a hidden node."""
    if not first._local_tensor.requires_grad:
        # What autograd does not record gives what it knows nothing of. A custom Function may return
        # any tensor, also one that was never touched in its forward: C++ has marked it then.
        return NO_TABLE if any_requires_grad(first) and is_grad_enabled() else GRAD_IDLE
    if is_grad_enabled():
        usual = not first._may_have_hidden_node and forward_grad_enabled()
        return GRAD_RECORDED if usual else NO_TABLE
    # `_table_outside_autograd` written out: optimizers ask each parameter for its dtype.
    if first._stray_grad_guard is None:
        local_outside_autograd(first)
    return NO_GRAD


def table_of_two(first: DTensor, second: DTensor) -> CallTable:
    """`table_for_operands` without its loop: a linear layer without bias asks each time."""
    one, other = first._local_tensor.requires_grad, second._local_tensor.requires_grad
    if not is_grad_enabled():
        return _table_outside_autograd((first, second)) if one or other else GRAD_IDLE
    if not (one or other):
        # As in `torch_function`: what a custom Function has returned is joined first.
        return NO_TABLE if any_requires_grad(first, second) else GRAD_IDLE
    hidden = first._may_have_hidden_node or second._may_have_hidden_node
    if one and other and not hidden and forward_grad_enabled():
        return GRAD_RECORDED
    return table_for_operands((first, second))


def table_of_three(first: DTensor, second: DTensor, third: DTensor) -> CallTable:
    """`table_for_operands` without its loop: a linear layer with its bias asks each time."""
    one, other, last = first._local_tensor, second._local_tensor, third._local_tensor
    if one.requires_grad and other.requires_grad and last.requires_grad:
        hidden = (
            first._may_have_hidden_node
            or second._may_have_hidden_node
            or third._may_have_hidden_node
        )
        if is_grad_enabled() and not hidden and forward_grad_enabled():
            return GRAD_RECORDED
    elif not (one.requires_grad or other.requires_grad or last.requires_grad):
        # As in `torch_function`: what a custom Function has returned is joined first.
        hidden = is_grad_enabled() and any_requires_grad(first, second, third)
        return NO_TABLE if hidden else GRAD_IDLE
    return table_for_operands((first, second, third))


def table_for_operands(operands: Sequence[DTensor]) -> CallTable:
    """The table for the autograd state of a call. Joins hidden nodes of its operands.

    Raises:
        UnsupportedError: see `join_hidden_node`.
    """
    if not is_grad_enabled():
        # As where grad mode is on: what requires no grad gives what autograd knows nothing of.
        idle = not any([operand._local_tensor.requires_grad for operand in operands])
        return GRAD_IDLE if idle else _table_outside_autograd(operands)
    if not forward_grad_enabled():
        return NO_TABLE
    recorded = [operand._local_tensor.requires_grad for operand in operands]
    # One question for all of them: each costs as much as a look-up.
    if True not in recorded and not any_requires_grad(*operands):
        return GRAD_IDLE
    found = GRAD_IDLE
    for operand, wants in zip(operands, recorded, strict=True):
        # `may_have_hidden_node` written out.
        if operand._may_have_hidden_node or (not wants and any_requires_grad(operand)):
            join_hidden_node(operand)
            # Joined to a node, it has another local tensor.
            wants = operand._local_tensor.requires_grad
        if wants:
            found = GRAD_RECORDED
    return found


def _table_outside_autograd(operands: Iterable[DTensor]) -> CallTable:
    """`NO_GRAD`, for a call with grad mode off of operands of which one may require grad.

    A use without grad may be the forward of a custom Function: see `local_outside_autograd`.
    """
    for operand in operands:
        if operand._stray_grad_guard is None and operand._local_tensor.requires_grad:
            local_outside_autograd(operand)
    return NO_GRAD
