"""Gradients of all parameters of a buffer, as what is concatenated to send them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vescale_parallel._zero.flat_plan import Place


def packed_pieces(
    places: Sequence[Place], gradients: Sequence[Tensor | None], dtype: torch.dtype, total: int
) -> list[Tensor] | None:
    """Return the gradients, flat, with zeros between and behind them.

    None where one is not there, not dense, or in another dtype.

    Args:
        places: where each is in the buffer.
        gradients: one for each.
        dtype: of their sums.
        total: elements of the buffer.
    """
    pieces: list[Tensor] = []
    at = 0
    for (_, _, offset), gradient in zip(places, gradients, strict=True):
        # `cat` would give them a common dtype, by rules that have nothing to do with the plan's.
        if gradient is None or gradient.dtype is not dtype:
            return None
        if gradient.layout is not torch.strided:
            return None
        if offset > at:
            # Padding between slots, which are aligned for kernels.
            pieces.append(gradient.new_zeros(offset - at))
        pieces.append(gradient.reshape(-1))
        at = offset + gradient.numel()
    if total > at:
        pieces.append(pieces[-1].new_zeros(total - at))
    return pieces
