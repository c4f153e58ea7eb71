"""Property: our Philox4x32-10 is the published one, block by block and for any broadcasting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vescale_rng._cuda.philox import philox4x32, split64

# The known-answer vectors of Random123 (kat_vectors, "philox4x32 10"): counter, key, block.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
WORD = st.integers(0, 2**32 - 1)


def words(text):
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "block"), VECTORS)
def test_the_published_blocks(counter, key, block):
    assert tuple(map(int, philox4x32(words(counter), words(key)))) == words(block)


def scalar(counter, key):
    """The paper's rounds on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


@given(st.tuples(*[WORD] * 4), st.tuples(*[WORD] * 2))
def test_any_block_is_that_of_the_rounds_on_integers(counter, key):
    assert tuple(map(int, philox4x32(counter, key))) == scalar(counter, key)


def test_counters_and_keys_broadcast():
    rows, columns = np.arange(3)[:, None], np.arange(5, dtype=np.int32)
    block = philox4x32((rows, 7, columns, 2**32 - 1), (np.uint32(11), 13))
    for row in range(3):
        for column in range(5):
            expected = scalar((row, 7, column, 2**32 - 1), (11, 13))
            assert tuple(int(word[row, column]) for word in block) == expected


def test_halves_of_64_bits():
    low, high = split64(np.array([0x123456789ABCDEF0, 2**64 - 1], dtype=np.uint64))
    assert low.tolist() == [0x9ABCDEF0, 2**32 - 1]
    assert high.tolist() == [0x12345678, 2**32 - 1]
