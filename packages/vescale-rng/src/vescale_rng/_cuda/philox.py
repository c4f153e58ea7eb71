"""Philox4x32-10: four random words as a function of a counter and a key, in numpy.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

U32 = NDArray[np.uint32]
Words = tuple[U32, U32, U32, U32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]
) -> Words:
    """Return the block of four words at each counter.

    Args:
        counter: its four 32-bit words, the least significant first; integers or integer arrays
            that broadcast, of any dtype, with values below 2**32.
        key: its two 32-bit words, likewise.

    Returns:
        The four words of each block, as arrays of the shape that counter and key broadcast to.
    """
    # 64-bit lanes: numpy has no 32 x 32 -> 64 product.
    c0, c1, c2, c3, k0, k1 = np.broadcast_arrays(*(_lane(word) for word in (*counter, *key)))
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (high >> _HALF) ^ c1 ^ k0, high & _LOW
        c2, c3 = (low >> _HALF) ^ c3 ^ k1, low & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return _word(c0), _word(c1), _word(c2), _word(c3)


def split64(value: ArrayLike) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the low and the high 32 bits of 64-bit values, as a counter or a key takes them."""
    lanes = _lane(value)
    return lanes & _LOW, lanes >> _HALF


def _lane(word: ArrayLike) -> NDArray[np.uint64]:
    return np.asarray(word).astype(np.uint64)


def _word(lane: NDArray[Any]) -> U32:
    return lane.astype(np.uint32)
