"""Recognises plain tensors that are parameters or made alike: every data rank holds all."""

from typing import Any

import torch
from torch import nn

_MARK = "_vescale_rng_parameter"

# What these make of a parameter is replicated as it is: `weight.data.normal_()` initialises a
# parameter, and `torch.randn_like(weight)` is noise for it.
_ALIKE = (
    *(getattr(torch.Tensor, name).__get__ for name in ("data", "grad")),
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.new_empty,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.clone,
    torch.detach,
)
MAKES_ALIKE = frozenset(_ALIKE)


def is_parameter(tensor: Any) -> bool:
    """Tell whether a tensor is a parameter, a view of one, or was made like one."""
    if isinstance(tensor, nn.Parameter) or hasattr(tensor, _MARK):
        return True
    base = tensor._base if isinstance(tensor, torch.Tensor) else None
    return isinstance(base, nn.Parameter) or hasattr(base, _MARK)


def marked(result: Any, source: Any) -> Any:
    """Return `result`, with a mark if it was made of a parameter."""
    if isinstance(result, torch.Tensor) and is_parameter(source):
        setattr(result, _MARK, True)
    return result
