"""Finds whether tensors changed their values, of which versions do not show all writes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from vescale_dtensor import DTensor

SMALL: Final = 16_384
"""Elements of a buffer that is copied and compared each time."""

CHECKED: Final = 2
"""How often larger ones are: what writes does so from the start."""


class Before:
    """A tensor as it is when this is made.

    Args:
        tensor: the tensor; of a distributed one this rank's part is looked at.
        copies: whether values are compared, beside torch's count of writes.
    """

    def __init__(self, tensor: Tensor, *, copies: bool) -> None:
        self._tensor = tensor
        # torch counts no writes to inference tensors.
        self._version = None if tensor.is_inference() else tensor._version
        local = _local(tensor)
        is_dense = local.layout is torch.strided and not (local.is_meta or local.is_quantized)
        # torch's batch norm writes to running statistics without counting, and so does what is done
        # to `.data`.
        self._copy = local.clone() if copies and is_dense else None

    def has_changed(self, now: Tensor | None) -> bool:
        """Whether another tensor is there now, or the same with other values."""
        if now is not self._tensor:
            return True
        if self._version is not None and now._version != self._version:
            return True
        return self._copy is not None and not _are_equal(self._copy, _local(now))


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    # NaN equals nothing, and is no write.
    return bool(((one == other) | ((one != one) & (other != other))).all())
