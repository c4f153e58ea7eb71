"""Gradients of all parameters of a buffer, as what is concatenated to send them, and how."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vescale_comm import Group


def packed_pieces(
    starts: Sequence[int],
    ends: Sequence[int],
    gradients: Sequence[Tensor | None],
    dtype: torch.dtype,
    total: int,
) -> list[Tensor] | None:
    """Return the gradients, flat, with zeros between and behind them.

    None where one is not there, not dense, or in another dtype.

    Args:
        starts: where each begins in the buffer.
        ends: where each ends.
        gradients: one for each.
        dtype: of their sums.
        total: elements of the buffer.
    """
    pieces: list[Tensor] = []
    at = 0
    for start, end, gradient in zip(starts, ends, gradients, strict=True):
        # `cat` would give them a common dtype, by rules that have nothing to do with the plan's.
        if gradient is None or gradient.dtype is not dtype:
            return None
        if gradient.layout is not torch.strided:
            return None
        if start > at:
            # Padding between slots, which are aligned for kernels.
            pieces.append(gradient.new_zeros(start - at))
        pieces.append(gradient.reshape(-1))
        at = end
    if total > at:
        pieces.append(pieces[-1].new_zeros(total - at))
    return pieces


def order_of(packed: Tensor, group: Group) -> Any:
    """In which order the ranks' gradients are added up: an `order=` of `reduce_scatter`."""
    # Halves in float32, as gradients of full parameters. And gloo's own way adds up everything on
    # every rank, of which each keeps a part: twice the bytes, in four times the messages.
    exchanged = group.backends.get(packed.device.type) == "gloo"
    return "rank" if exchanged or packed.dtype.itemsize < 4 else "native"
