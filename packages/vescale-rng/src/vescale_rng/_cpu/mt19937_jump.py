"""Jump-ahead of mt19937: the words a distance away, without the words in between.

Every bit of the generator follows one linear recurrence over GF(2) of degree 19937. The state
after n steps is therefore `t**n mod phi(t)` applied to the words, where phi is the
characteristic polynomial of that recurrence. Polynomials over GF(2) are Python integers here:
bit i is the coefficient of `t**i`.

Source: M. Matsumoto, T. Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998), for the recurrence
and for phi; H. Haramoto et al., "Efficient Jump Ahead for F2-Linear Random Number Generators",
INFORMS J. Computing 20 (2008), for the method.
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

WORDS = 624
_MIDDLE = 397
_DEGREE = 19937
_MATRIX = 0x9908B0DF
_UPPER = np.uint32(0x80000000)
_LOWER = np.uint32(0x7FFFFFFF)

# Coefficients used together when a polynomial is applied: 2**4 sums of shifted words are made
# once, and then one of them is added for every four coefficients.
_DIGIT = 4
# Digits added by one numpy call: a gathered block of 256 * 624 words stays in the L2 cache.
_DIGITS_AT_ONCE = 256


def extend(words: Words, count: int) -> Words:
    """Return the 624 `words` followed by the next `count` words of the recurrence."""
    out = np.empty(WORDS + count, np.uint32)
    out[:WORDS] = words
    # A word depends on one 227 places back, so this many can be made by one array operation.
    stride = WORDS - _MIDDLE
    for start in range(0, count, stride):
        n = min(stride, count - start)
        mixed = (out[start : start + n] & _UPPER) | (out[start + 1 : start + 1 + n] & _LOWER)
        twist = (mixed >> np.uint32(1)) ^ ((mixed & np.uint32(1)) * np.uint32(_MATRIX))
        out[start + WORDS : start + WORDS + n] = out[start + _MIDDLE :][:n] ^ twist
    return out


def block_after(words: Words, blocks: int) -> Words:
    """Return the 624-word block that comes `blocks` (at least 1) blocks after `words`."""
    # The recurrence reads one bit of the oldest word only, so a jump leaves its other 31 bits
    # undetermined. Jump one block short and step: the step never reads those bits.
    if blocks > 1:
        words = _apply(_power((blocks - 1) * WORDS), words)
    return extend(words, WORDS)[WORDS:]


def _apply(polynomial: int, words: Words) -> Words:
    """Add the windows of 624 words that start where `polynomial` has a coefficient."""
    size = -(-_DEGREE // _DIGIT) * _DIGIT
    stream = extend(words, size + _DIGIT)
    sums = np.zeros((2**_DIGIT, size + WORDS), np.uint32)
    for value in range(1, 2**_DIGIT):
        # The sum without the lowest coefficient is there already.
        low = value & -value
        shift = low.bit_length() - 1
        sums[value] = sums[value ^ low] ^ stream[shift : shift + size + WORDS]
    windows = np.lib.stride_tricks.sliding_window_view(sums, WORDS, axis=1)[:, ::_DIGIT]
    # Row d of `windows[v]` is the sum for the digit value v at place d.
    digits = _coefficients(polynomial, size).reshape(-1, _DIGIT) @ (1 << np.arange(_DIGIT))
    out = np.zeros(WORDS, np.uint32)
    for start in range(0, digits.size, _DIGITS_AT_ONCE):
        chosen = digits[start : start + _DIGITS_AT_ONCE]
        rows = windows[chosen, np.arange(start, start + chosen.size)]
        xor: Any = np.bitwise_xor  # its overloads differ between versions of numpy
        out ^= xor.reduce(rows, axis=0)
    return out


@lru_cache(maxsize=1024)  # 2.5 KB each; a training step repeats the same few distances
def _power(exponent: int) -> int:
    """Return `t**exponent mod phi`, by squaring."""
    # The leading bits of the exponent name a power below the degree: no reduction needed.
    squarings = max(0, exponent.bit_length() - _DEGREE.bit_length() + 1)
    power = 1 << (exponent >> squarings)
    for i in reversed(range(squarings)):
        power = _reduce(_square(power) << (exponent >> i & 1))
    return power


def _square(polynomial: int) -> int:
    """Square over GF(2): every coefficient moves to twice its place."""
    bits = _coefficients(polynomial, polynomial.bit_length())
    spread = np.zeros(2 * bits.size, np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _reduce(polynomial: int) -> int:
    """Return the remainder of `polynomial` by phi."""
    mask = (1 << _DEGREE) - 1
    while high := polynomial >> _DEGREE:
        # t**19937 equals the lower terms of phi. The next one is t**19314: 32 rounds suffice.
        polynomial &= mask
        for exponent in _lower_exponents():
            polynomial ^= high << exponent
    return polynomial


def _coefficients(polynomial: int, count: int) -> npt.NDArray[np.uint8]:
    raw = polynomial.to_bytes(-(-count // 8), "little")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count, bitorder="little")


@cache
def _lower_exponents() -> tuple[int, ...]:
    """Return the exponents of phi below its degree, from Matsumoto and Nishimura's closed form."""
    a = [_MATRIX >> i & 1 for i in range(32)]

    def times(polynomial: int, i: int) -> int:
        """Return polynomial * (t**i + t**(i - 227))."""
        return polynomial << i ^ polynomial << i - (WORDS - _MIDDLE)

    def product(outer: int, inner: int) -> int:
        """Return (t**624 + t**397)**outer * (t**623 + t**396)**inner."""
        result = 1
        for _ in range(outer):
            result = times(result, WORDS)
        for _ in range(inner):
            result = times(result, WORDS - 1)
        return result

    # One bit of a word takes no part (32 - 1 and 31): the degree is 624 * 32 - 31.
    phi = product(1, 31)
    for i in range(31):
        phi ^= a[i] * product(1, 30 - i)
    phi ^= a[31]
    assert phi.bit_length() == _DEGREE + 1
    return tuple(i for i in range(_DEGREE) if phi >> i & 1)
