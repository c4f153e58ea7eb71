"""Converts NumPy's and torch's numbers among the arguments of a call to Python numbers.

Rules ask whether an argument is a number: a partial sum plus a number is not a partial sum.
`numpy.float32` is no number to Python, and would pass for an option that changes nothing. Sizes and
dims may be tensors of one integer (`torch.div(n, 2, rounding_mode="floor")`): these are numbers,
too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Functions that take sizes or dims. For these a 0-dim integer tensor is a number, for others it is
# an operand.
_NAMES = """
view reshape expand broadcast_to repeat tile unflatten flatten split tensor_split chunk narrow
select unbind squeeze unsqueeze transpose swapaxes swapdims permute movedim moveaxis roll flip topk
sum mean prod amax amin argmax argmin softmax log_softmax cumsum cumprod logsumexp pad unfold
"""
_INTEGRAL = frozenset(_NAMES.split())
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def with_python_numbers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with Python numbers in place of NumPy's, and of tensors that are sizes.

    NumPy arrays that index become tensors. Reading a DTensor as a size is a collective.
    """
    if asks_numbers(func, args, kwargs):
        # The first argument is the tensor that is operated on, also where it has no dims.
        args = (*args[:1], *map(_number, args[1:]))
        kwargs = {
            name: _number(value) if name in _SIZES else value for name, value in kwargs.items()
        }
    arrays = func in _INDEXING
    if not any(_has_numpy(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    return (
        tuple(_python(value, arrays) for value in args),
        {name: _python(value, arrays) for name, value in kwargs.items()},
    )


_SIZES = frozenset(
    {"dim", "dims", "size", "shape", "sizes", "repeats", "chunks", "start", "length"}
)


def asks_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether tensors are given where this function takes sizes or dims."""
    if getattr(func, "__name__", "") not in _INTEGRAL:
        return False
    named = [value for name, value in kwargs.items() if name in _SIZES]
    return any(map(_has_integer, (*args[1:], *named)))


def _has_integer(value: Any) -> bool:
    """Whether a value is a 0-dim integer tensor, or a sequence that contains one."""
    if type(value) in (tuple, list):
        return any(map(_has_integer, value))
    return isinstance(value, Tensor) and not value.ndim and value.dtype in _INTEGERS


def _number(value: Any) -> Any:
    """Convert 0-dim integer tensors to Python integers."""
    if type(value) in (tuple, list):
        return type(value)([_number(item) for item in value])
    return int(value) if _has_integer(value) else value


def _has_numpy(value: Any) -> bool:
    """Whether a value is NumPy's, or a sequence that contains one of NumPy's."""
    if type(value) in (tuple, list):
        return any(map(_has_numpy, value))
    return type(value).__module__ == "numpy"  # by name: this package does not need NumPy


def _python(value: Any, arrays: bool) -> Any:
    """Convert NumPy scalars to Python numbers; if `arrays`, NumPy arrays to tensors."""
    if type(value) in (tuple, list):
        return type(value)([_python(item, arrays) for item in value])
    if type(value).__module__ != "numpy":
        return value
    if type(value).__name__ == "ndarray":
        return torch.as_tensor(value) if arrays else value
    return value.item()
