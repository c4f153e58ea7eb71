"""Philox4x32-10 and the array operations in numpy, for the CPU.

Two words of a counter share 64 bits, so that a product lands where the next round wants it: five
passes over the state make a round, where a word by itself would need twelve.
"""

from typing import Any

import numpy as np

from vescale_rng._portable.arrays import Arrays, Width
from vescale_rng._portable.philox_rounds import INCREMENTS, MULTIPLIERS, ROUNDS

_SHIFT = np.array(32, dtype=np.uint64)
_FACTORS = tuple(np.array(factor, dtype=np.uint64) for factor in MULTIPLIERS)
_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(INCREMENTS, dtype=np.uint64)
_MASK = (1 << 32) - 1
_LOWER, _UPPER = np.uint64(_MASK), np.uint64(_MASK << 32)
_INTS: dict[int, Any] = {32: np.int32, 64: np.int64}
_WORDS: dict[int, Any] = {32: np.uint32, 64: np.uint64}
_FLOATS: dict[int, Any] = {32: np.float32, 64: np.float64}


class NumpyArrays(Arrays):
    """See `Arrays`."""

    def blocks(self, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """See `Arrays.blocks`."""
        grid: Any = np.array(start, dtype=np.int64)
        for size, stride in zip(sizes, strides, strict=True):
            grid = grid[..., None] + np.arange(0, size * stride, stride, dtype=np.int64)
        return grid

    def wide_words(self, key: int, blocks: Any, stream: int) -> Any:
        """See `Arrays.wide_words`."""
        blocks = blocks.view(np.uint64)
        # The upper halves; the shift drops what the sums carry.
        keys = (np.array((key & _MASK, key >> 32), dtype=np.uint64) + _STEPS) << _SHIFT
        # Each half holds two words of the counter, the earlier one in the upper bits. The first
        # round takes them apart by itself: words 2 and 3 are the same for all blocks.
        state = np.empty((2, blocks.size), dtype=np.uint64)
        first, second = state
        np.bitwise_and(blocks, _UPPER, out=first)
        first ^= keys[0, 0] ^ np.uint64((stream & _MASK) * MULTIPLIERS[1])
        np.bitwise_and(blocks, _LOWER, out=second)
        second *= _FACTORS[0]
        second ^= keys[0, 1] ^ np.uint64(stream >> 32 << 32)
        products = np.empty_like(state)
        of_second, of_first = products
        for lower, upper in keys[1:]:
            # Each half becomes the product of the other one's upper word, xor its own lower word
            # and the key in the upper bits. By `out`: operators would look each view up again.
            np.right_shift(second, _SHIFT, out=of_second)
            np.right_shift(first, _SHIFT, out=of_first)
            np.multiply(of_second, _FACTORS[1], out=of_second)
            np.multiply(of_first, _FACTORS[0], out=of_first)
            np.left_shift(state, _SHIFT, out=state)
            np.bitwise_xor(state, products, out=state)
            np.bitwise_xor(first, lower, out=first)
            np.bitwise_xor(second, upper, out=second)
        return state

    def words(self, key: int, blocks: Any, stream: int) -> Any:
        """See `Arrays.words`."""
        wide = self.wide_words(key, blocks, stream)
        words = np.empty((2, *wide.shape), dtype=np.uint32)
        np.right_shift(wide, _SHIFT, out=words[0], casting="unsafe")
        words[1] = wide
        return words

    def floats(self, integers: Any, width: Width) -> Any:
        """See `Arrays.floats`."""
        return integers.astype(_FLOATS[width])

    def signed(self, words: Any, width: Width) -> Any:
        """See `Arrays.signed`."""
        return words.view(_INTS[width])

    def high(self, wide: Any) -> Any:
        """See `Arrays.high`."""
        return (wide >> _SHIFT).view(np.int64)

    def low(self, wide: Any, bits: int) -> Any:
        """See `Arrays.low`."""
        return (wide & np.uint64((1 << bits) - 1)).view(np.int64)

    def plus(self, words: Any, constant: int, width: Width) -> Any:
        """See `Arrays.plus`."""
        return words + _WORDS[width](constant)

    def top(self, words: Any, width: Width) -> Any:
        """See `Arrays.top`."""
        return (words >> _WORDS[width](width - 1)).view(_INTS[width])

    def modulo(self, words: Any, divisor: int, width: Width) -> Any:
        """See `Arrays.modulo`."""
        if divisor == 1 << width:
            rest = words
        elif divisor & (divisor - 1):
            # Division by one number has a fast loop in numpy, the remainder has not.
            rest = words - words // _WORDS[width](divisor) * _WORDS[width](divisor)
        else:
            rest = words & _WORDS[width](divisor - 1)
        return rest.astype(np.int64) if width == 32 else rest.view(np.int64)

    def bits(self, floats: Any) -> Any:
        """See `Arrays.bits`."""
        return floats.view(_INTS[8 * floats.itemsize])

    def from_bits(self, integers: Any) -> Any:
        """See `Arrays.from_bits`."""
        return integers.view(_FLOATS[8 * integers.itemsize])

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """See `Arrays.where`."""
        return np.where(condition, yes, no)

    def floor(self, floats: Any) -> Any:
        """See `Arrays.floor`."""
        return np.floor(floats)

    def clamp(self, floats: Any, least: float, most: float) -> Any:
        """See `Arrays.clamp`."""
        return np.clip(floats, least, most)

    def sqrt(self, floats: Any) -> Any:
        """See `Arrays.sqrt`."""
        return np.sqrt(floats)

    def pair(self, first: Any, second: Any) -> Any:
        """See `Arrays.pair`."""
        return np.stack((first, second))

    def in_order(self, values: Any) -> Any:
        """See `Arrays.in_order`."""
        blocks = values.shape[-1]
        ordered = np.empty((blocks, values.size // max(1, blocks)), dtype=values.dtype)
        # Assigned one by one: five times as fast as numpy's and torch's transposing copies.
        for word, row in enumerate(values.swapaxes(0, -2).reshape(-1, blocks)):
            ordered[:, word] = row
        return ordered
