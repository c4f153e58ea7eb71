"""Tensors of other libraries that hold DTensors: weights that torchao has quantised, say.

A tensor subclass with a function override of its own is a plain operand as long as its data is
this rank's: it counts as replicated. One that keeps DTensors inside has the global shape already,
and its library computes with what it keeps. So the library is asked, by torch's own protocol.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vescale_comm.nested import tensors_within

from vescale_dtensor._tensor.dtensor import DTensor


def is_for_others(types: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call has an operand that holds DTensors, and whose class answers the call.

    Args:
        types: the classes with an override among the operands, as `__torch_function__` gets them.
        args: the call's arguments by position.
        kwargs: those by name, or None.
    """
    others = [kind for kind in types if hasattr(kind, "__tensor_flatten__") and kind is not DTensor]
    if not others:
        return False
    operands = tensors_within((args, kwargs or {}))
    return any(type(one) in others and _holds_dtensors(one) for one in operands)


def _holds_dtensors(tensor: Tensor) -> bool:
    """Whether a wrapper of another library has a DTensor inside, at any depth."""
    if isinstance(tensor, DTensor):
        return True
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return False
    names, _ = flatten()
    return any(_holds_dtensors(getattr(tensor, name)) for name in names)
