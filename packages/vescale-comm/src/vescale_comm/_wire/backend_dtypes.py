"""Dtypes that every backend moves, and the view as bytes for all others."""

import torch
from torch import Tensor

BACKEND_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""What gloo and NCCL both move. Anything else is bytes to them: it only has to arrive."""


def as_backend_dtype(x: Tensor) -> Tensor:
    """Return the same memory in a dtype that every backend moves; `x` is contiguous and 1-D."""
    return x if x.dtype in BACKEND_DTYPES else x.view(torch.uint8)
