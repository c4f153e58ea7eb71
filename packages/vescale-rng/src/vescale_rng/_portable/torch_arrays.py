"""Philox4x32-10 and the array operations in torch: on any device, and without Triton.

torch has next to no unsigned arithmetic, so 32-bit words live in int64, and 64-bit words are the
int64 of the same bits.
"""

from typing import Any

import numpy as np
import torch

from vescale_rng._portable.arrays import Arrays, Width
from vescale_rng._portable.philox_rounds import INCREMENTS, MULTIPLIERS, ROUNDS

_MASK = (1 << 32) - 1
_INTS = {32: torch.int32, 64: torch.int64}
_FLOATS = {32: torch.float32, 64: torch.float64}


def _wrapped(value: int) -> int:
    """Return the int64 with the lower 64 bits of `value`."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class TorchArrays(Arrays):
    """See `Arrays`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def blocks(self, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """See `Arrays.blocks`."""
        grid = torch.full((), start, dtype=torch.int64, device=self._device)
        for size, stride in zip(sizes, strides, strict=True):
            grid = grid.unsqueeze(-1) + torch.arange(size, device=self._device) * stride
        return grid

    def _rounds(self, key: Any, blocks: Any, stream: int) -> tuple[Any, Any, Any, Any]:
        """Return the four words of each block."""
        # The key may be a tensor, so that no device waits for its value.
        k0, k1 = key & _MASK, (key >> 32) & _MASK
        c0, c1 = blocks & _MASK, (blocks >> 32) & _MASK
        c2, c3 = torch.full_like(c0, stream & _MASK), torch.full_like(c0, stream >> 32)
        for turn in range(ROUNDS):
            first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
            # Products of 64 bits, whose sign means nothing; the masks drop what it smears.
            c0 = ((second >> 32) ^ c1 ^ (k0 + turn * INCREMENTS[0])) & _MASK
            c2 = ((first >> 32) ^ c3 ^ (k1 + turn * INCREMENTS[1])) & _MASK
            c1, c3 = second & _MASK, first & _MASK
        return c0, c1, c2, c3

    def wide_words(self, key: Any, blocks: Any, stream: int) -> Any:
        """See `Arrays.wide_words`."""
        c0, c1, c2, c3 = self._rounds(key, blocks, stream)
        return torch.stack((c0 << 32 | c1, c2 << 32 | c3))

    def words(self, key: Any, blocks: Any, stream: int) -> Any:
        """See `Arrays.words`."""
        c0, c1, c2, c3 = self._rounds(key, blocks, stream)
        return torch.stack((c0, c2, c1, c3)).view(2, 2, -1)

    def floats(self, integers: Any, width: Width) -> Any:
        """See `Arrays.floats`."""
        return integers.to(_FLOATS[width])

    def signed(self, words: Any, width: Width) -> Any:
        """See `Arrays.signed`."""
        return words

    def high(self, wide: Any) -> Any:
        """See `Arrays.high`."""
        return (wide >> 32) & _MASK

    def low(self, wide: Any, bits: int) -> Any:
        """See `Arrays.low`."""
        return wide & ((1 << bits) - 1)

    def plus(self, words: Any, constant: int, width: Width) -> Any:
        """See `Arrays.plus`."""
        return (words + constant) & _MASK if width == 32 else words + _wrapped(constant)

    def top(self, words: Any, width: Width) -> Any:
        """See `Arrays.top`."""
        return (words >> (width - 1)) & 1

    def modulo(self, words: Any, divisor: int, width: Width) -> Any:
        """See `Arrays.modulo`."""
        if not divisor & (divisor - 1):
            return words & _wrapped(divisor - 1)
        if width == 32:
            return words % divisor
        if divisor > 1 << 63:
            # Unsigned comparison: flipping the sign bits makes it a signed one.
            least = _wrapped(divisor ^ 1 << 63)
            return torch.where(
                (words ^ _wrapped(1 << 63)) >= least, words - _wrapped(divisor), words
            )
        # Half the word divides as a signed number; what is missing is less than two divisors.
        halved = (words >> 1) & ((1 << 63) - 1)
        rest = words - (torch.div(halved, divisor, rounding_mode="floor") << 1) * divisor
        return torch.where((rest < 0) | (rest >= divisor), rest - divisor, rest)

    def bits(self, floats: Any) -> Any:
        """See `Arrays.bits`."""
        return floats.view(_INTS[8 * floats.element_size()])

    def from_bits(self, integers: Any) -> Any:
        """See `Arrays.from_bits`."""
        return integers.view(_FLOATS[8 * integers.element_size()])

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """See `Arrays.where`."""
        return torch.where(condition, yes, no)

    def floor(self, floats: Any) -> Any:
        """See `Arrays.floor`."""
        return torch.floor(floats)

    def clamp(self, floats: Any, least: float, most: float) -> Any:
        """See `Arrays.clamp`."""
        return torch.clamp(floats, least, most)

    def sqrt(self, floats: Any) -> Any:
        """See `Arrays.sqrt`."""
        if floats.device.type == "cpu":
            # torch on CPU takes MKL's, which is not correctly rounded; the processor's is.
            return torch.from_numpy(np.sqrt(floats.numpy()))
        return torch.sqrt(floats)

    def pair(self, first: Any, second: Any) -> Any:
        """See `Arrays.pair`."""
        return torch.stack((first, second))

    def in_order(self, values: Any) -> Any:
        """See `Arrays.in_order`."""
        return values.permute(tuple(reversed(range(values.ndim)))).reshape(values.shape[-1], -1)
