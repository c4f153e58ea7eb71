"""`Tensor.grad_dtype`: in which dtype a leaf's gradient is kept, where that is not its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_dtype(leaf: Tensor) -> torch.dtype:
    """Dtype of the gradient of a leaf; its own where any would do."""
    return leaf.dtype if leaf.grad_dtype is None else leaf.grad_dtype


def dtype_of_sums(leaves: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
    """A dtype, or a wider one, in which no gradient is rounded that a leaf keeps in its own."""
    # Of all leaves of one dtype, several times a backward: mostly without a call for each.
    asked = {one.grad_dtype or one.dtype for one in leaves} - {leaves[0].dtype}
    return functools.reduce(torch.promote_types, asked, dtype)


def keep_gradient_dtype(made: Tensor, given: Tensor) -> None:
    """Let a leaf that takes the place of another keep its gradient as that one did."""
    # Not where nobody has asked for one: what follows the dtype goes on to follow it.
    if given.grad_dtype is not given.dtype:
        made.grad_dtype = given.grad_dtype
