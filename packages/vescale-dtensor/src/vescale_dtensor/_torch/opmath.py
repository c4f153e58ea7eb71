"""The precision in which a rule computes: single precision for half floats, and autocast.

Torch's kernels compute sums, means and exponentials of half floats in single precision and round
once; a rule that writes such an operation out in several steps has to do the same. Autocast acts
below this package, on each torch function of a local tensor. So where a rule composes an operation
of others, torch is asked which dtype the whole operation would have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._torch.compat import any_autocast, no_torch_function

_HALF = frozenset({torch.float16, torch.bfloat16})


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's kernels compute with numbers of `dtype`."""
    return torch.float32 if dtype in _HALF else dtype


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the products of shards are multiplied: double precision.

    The shards' products may be beyond the range of single precision where that of all is not.
    """
    if dtype is torch.complex64:
        return torch.complex128
    return torch.float64 if dtype in _HALF or dtype is torch.float32 else dtype


def to_opmath(x: Tensor) -> Tensor:
    """Return `x`, in single precision if it is in half precision."""
    return x.float() if x.dtype in _HALF else x


def opmath_sum(x: Tensor, divisor: Tensor | float | None = None) -> Tensor:
    """Return the sum of all elements, divided by `divisor` if given; rounded once, at the end."""
    if x.dtype not in _HALF:
        found = x.sum()
        return found if divisor is None else found / divisor
    # Divided before rounding: a float16 sum may overflow where its mean does not.
    found = x.sum(dtype=torch.float32)
    return (found if divisor is None else found / divisor).to(x.dtype)


def result_dtype(func: Callable[..., Tensor], *arguments: Any) -> torch.dtype:
    """Return the dtype that `func` gives for these small tensors here, also under autocast."""
    # Hidden from function modes: the question is no part of the program that a mode records.
    with torch.no_grad(), no_torch_function():
        return func(*arguments).dtype


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off for this device type."""
    return torch.autocast(device_type, enabled=False) if any_autocast() else nullcontext()
