"""Logarithms of sums of exponentials, of parts that several ranks hold.

A part may be all minus infinity, where the logarithm of its own sum has no gradient: so what is
combined is the sum, scaled by the part's largest element, and the logarithm is of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_dtensor._ops.common.sharded_dim import extreme_identity, pad_empty_dims


def scaled_sum(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """A part's sum of exponentials, divided by that of its largest element, and that element.

    Args:
        x: the part, real and floating; it may be empty.
        dims: that are summed.
        keepdim: whether the result keeps them.

    Returns:
        Both along a new first dim of two. Only the sum is differentiable.
    """
    with torch.no_grad():
        padded = pad_empty_dims(x, dims, extreme_identity(x.dtype, largest=True))
        largest = padded.amax(dims, keepdim=True)
    total = (x - _shift(largest)).exp().sum(dims, keepdim=keepdim)
    return torch.stack([total, largest.view(total.shape)])


def log_of_sums(parts: Tensor) -> Tensor:
    """The logarithm of the sum of parts.

    Args:
        parts: results of `scaled_sum`, one for each part along a first dim, which is not empty.
    """
    sums, maxima = parts[:, 0], parts[:, 1].detach()
    largest = maxima.amax(0)
    # Of two equal infinities the difference is NaN.
    scale = torch.where(maxima == largest, 1, (maxima - largest).exp())
    return (sums * scale).sum(0).log() + _shift(largest)


def _shift(largest: Tensor) -> Tensor:
    """What exponents are diminished by: nothing where that would be infinite, or NaN."""
    return torch.where(largest.isfinite(), largest, 0)
