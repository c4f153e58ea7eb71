"""Refuses writes to elements that share memory, as torch does: to tensors with expanded dims.

By the global strides, before anything runs: only ranks with elements would refuse it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vescale_dtensor._planning.op_call import OpCall, expanded_dims
from vescale_dtensor._tensor.copied_views import same_memory
from vescale_dtensor._tensor.dtensor import DTensor

# Torch lets these write: each element gets the same value. It lets others, too (`index_put_`,
# `tril_`), with a warning that they will be refused; what they leave depends on the kernel.
_NAMES = "fill_ zero_ _foreach_zero_ masked_fill_ fill_diagonal_ requires_grad_ detach_"
_PERMITTED = frozenset(name for name in _NAMES.split())


def refuse_overlapping(
    target: Tensor, func: Callable[..., Any], operands: Sequence[Tensor] = ()
) -> None:
    """Refuse a write to a tensor of which some elements are one in memory.

    Args:
        target: what is written to.
        func: by what.
        operands: the tensors of the call: `fill_` by a tensor is a copy to torch, and a copy of a
            tensor into itself is none.

    Raises:
        RuntimeError: as in torch, on every rank.
    """
    if not isinstance(target, DTensor) or not target._spec.has_gaps or not expanded_dims(target):
        return
    name = func.__name__
    if name == "copy_" and operands and all(operand is target for operand in operands):
        return
    if name not in _PERMITTED or (name == "fill_" and len(operands) > 1):
        refuse_overlapping_copy(target)


def refuse_overlapping_copy(target: DTensor) -> None:
    """Refuse to copy values into a tensor of which some elements are one in memory.

    Raises:
        RuntimeError: as in torch, on every rank.
    """
    if target._spec.has_gaps and expanded_dims(target):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            f"single memory location: {target!r} has expanded dims. clone() it first."
        )


def is_overlap(error: RuntimeError) -> bool:
    """Whether torch refused a write that reads what it writes in another shape."""
    return "refer to a single memory location" in str(error)


def read_apart(call: OpCall, written: int, locals_: list[Tensor], error: RuntimeError) -> None:
    """Clone those local operands that share memory with the one that is written to.

    Torch refuses such a write by strides; where one device has gaps between the elements it does
    not, and some rank's part may have none.

    Raises:
        RuntimeError: `error`, if one device has no gaps either.
    """
    target = locals_[written]
    for index, (operand, local) in enumerate(zip(call.operands, locals_, strict=True)):
        if local is target or not same_memory(local, target):
            continue
        wrappers = (operand, call.operands[written])
        if not any(isinstance(x, DTensor) and x._spec.has_gaps for x in wrappers):
            raise error
        locals_[index] = local.clone()


def copy_into(local: Tensor, values: Tensor) -> None:
    """Copy values that are equal along the expanded dims of a local tensor into it."""
    for dim, (extent, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if not stride and extent > 1:
            local, values = local.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    local.copy_(values)
