"""The precision in which a rule computes: single precision for sums of half floats, and autocast.

Torch's kernels take sums, means and exponentials of half floats in single precision and round once;
a rule that writes such an operation out in several steps has to do the same. Autocast decides below
this package, for each torch function on a local tensor; so where a rule composes an operation of
others, torch is asked which dtype the whole operation would give.
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
    """The dtype in which torch's kernels compute with numbers of this one."""
    return torch.float32 if dtype in _HALF else dtype


def to_opmath(x: Tensor) -> Tensor:
    """`x`, in single precision if it is in half."""
    return x.float() if x.dtype in _HALF else x


def opmath_sum(x: Tensor, divisor: Tensor | float | None = None) -> Tensor:
    """The sum of all elements, divided: rounded once, and never too large in between."""
    if x.dtype not in _HALF:
        found = x.sum()
        return found if divisor is None else found / divisor
    found = x.sum(dtype=torch.float32)
    return (found if divisor is None else found / divisor).to(x.dtype)


def result_dtype(func: Callable[..., Tensor], *arguments: Any) -> torch.dtype:
    """The dtype of what `func` gives for small tensors here, under autocast as well."""
    # Unseen: what is asked is no part of a program that is recorded.
    with torch.no_grad(), no_torch_function():
        return func(*arguments).dtype


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off for this kind of device, in the block."""
    return torch.autocast(device_type, enabled=False) if any_autocast() else nullcontext()
