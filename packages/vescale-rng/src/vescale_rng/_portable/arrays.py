"""Defines what a map needs of an array library; numpy and torch each give it."""

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeVar

Array = TypeVar("Array")
Width = Literal[32, 64]


class Arrays(ABC):
    """The operations that numpy and torch spell differently; +, -, *, /, &, >> they share.

    Words are unsigned numbers of 32 bits in arrays that can hold them, `words32` of shape
    (2, 2, n): half, pair, block, so that a block's four words in order are [0, 0], [1, 0], [0, 1],
    [1, 1]. Wide words have 64 bits, shape (2, n), and are `uint64` in numpy and two's complement
    `int64` in torch: maps treat them through `top` and `modulo` only.
    """

    @abstractmethod
    def blocks(self, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return the grid `start + sum(index * stride)`, of shape `sizes`, 64-bit integers."""

    @abstractmethod
    def wide_words(self, key: Any, blocks: Any, stream: int) -> Any:
        """Compute Philox of each of n blocks: words 0, 1 and 2, 3 as two 64-bit words, (2, n).

        Args:
            key: the 64-bit key.
            blocks: the lower 64 bits of the counters, (n,).
            stream: their upper 64 bits.
        """

    @abstractmethod
    def words(self, key: Any, blocks: Any, stream: int) -> Any:
        """Compute the same as four 32-bit words: (2, 2, n), see the class."""

    @abstractmethod
    def floats(self, integers: Any, width: Width) -> Any:
        """Convert integers, 0 <= i < 2**32 or signed, to floats of that width."""

    @abstractmethod
    def signed(self, words: Any, width: Width) -> Any:
        """Convert words below 2**(width - 1) to a signed integer type of that width."""

    @abstractmethod
    def high(self, wide: Any) -> Any:
        """Return the upper 32 bits of wide words, as signed 64-bit integers."""

    @abstractmethod
    def low(self, wide: Any, bits: int) -> Any:
        """Return the lower `bits` (at most 63) of wide words, as signed 64-bit integers."""

    @abstractmethod
    def plus(self, words: Any, constant: int, width: Width) -> Any:
        """Return `(words + constant) mod 2**width`: words again."""

    @abstractmethod
    def top(self, words: Any, width: Width) -> Any:
        """Return the highest bit of words, as a signed integer."""

    @abstractmethod
    def modulo(self, words: Any, divisor: int, width: Width) -> Any:
        """Return `words mod divisor`, 1 <= divisor <= 2**width, as int64 (modulo 2**64)."""

    @abstractmethod
    def bits(self, floats: Any) -> Any:
        """Return the bits of floats as signed integers of the same width."""

    @abstractmethod
    def from_bits(self, integers: Any) -> Any:
        """Return the floats with these bits."""

    @abstractmethod
    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """Return `yes` where the condition holds, `no` elsewhere."""

    @abstractmethod
    def floor(self, floats: Any) -> Any:
        """Return the largest integers not above, as floats."""

    @abstractmethod
    def clamp(self, floats: Any, least: float, most: float) -> Any:
        """Clamp floats to a range; NaN stays."""

    @abstractmethod
    def sqrt(self, floats: Any) -> Any:
        """Compute square roots, correctly rounded."""

    @abstractmethod
    def pair(self, first: Any, second: Any) -> Any:
        """Stack both on a new first dim."""

    @abstractmethod
    def in_order(self, values: Any) -> Any:
        """Order values of (2, 2, n) or (2, n) words by block, then by word: (n, 4) or (n, 2)."""
