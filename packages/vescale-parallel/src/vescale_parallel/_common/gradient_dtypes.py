"""`Tensor.grad_dtype`: in which dtype a leaf's gradient is kept, where that is not its own."""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_dtype(leaf: Tensor) -> torch.dtype:
    """Dtype of the gradient of a leaf; its own where any would do."""
    wanted: torch.dtype | None = getattr(leaf, "grad_dtype", None)
    return leaf.dtype if wanted is None else wanted


def keep_gradient_dtype(made: Tensor, given: Tensor) -> None:
    """Let a leaf that takes the place of another keep its gradient as that one did."""
    # Not where nobody has asked for one: what follows the dtype goes on to follow it.
    if hasattr(given, "grad_dtype") and given.grad_dtype is not given.dtype:
        made.grad_dtype = given.grad_dtype
