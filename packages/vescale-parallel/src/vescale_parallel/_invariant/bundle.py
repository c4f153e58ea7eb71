"""Gradients packed flat: one tensor for all that is summed and exchanged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bundle:
    """Where gradients lie in one flat tensor, and which rank needs the sum of which part.

    Attributes:
        parameters: their numbers among all parameters of the model.
        offsets: the element at which each begins.
        total: elements, padding included.
        dtype: of the sums.
        device: where they are.
        parts: for each rank that shares the batch, the elements (low, high) that it sums.
        gathered: whether every rank needs the sum of everything, and not of its own part only.
    """

    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    dtype: torch.dtype
    device: torch.device
    parts: tuple[tuple[int, int], ...]
    gathered: bool

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradients of one shard, packed; None where there is none of them.

        What has no gradient counts as zeros, and zeros have no sign: a rank that adds a gradient to
        nothing, and one that adds it to zeros, hold the same bits.
        """
        own = [gradients[number] for number in self.parameters]
        if all(one is None for one in own):
            return None
        packed = torch.zeros(self.total, dtype=self.dtype, device=self.device)
        for offset, gradient in zip(self.offsets, own, strict=True):
            if gradient is not None:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                # Added to zero, and not copied: -0.0 becomes 0.0.
                packed[offset : offset + dense.numel()].add_(dense.reshape(-1))
        return packed


def even_parts(total: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return parts of a flat tensor, as even as can be."""
    ends = [total * rank // ranks for rank in range(ranks + 1)]
    return tuple(pairwise(ends))


def row_major(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of what is unpacked: sums lie in a row, whatever parameters do."""
    return torch.empty(shape, device="meta").stride()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are added: halves in float32, rounded once at the end."""
    return torch.float32 if dtype.itemsize < 4 else dtype
