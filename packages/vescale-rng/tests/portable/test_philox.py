"""Property: our Philox4x32-10 is the published one, block by block and for any broadcasting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from portable_cases import ANSWERS, philox
from vescale_rng._cuda.philox import philox4x32, split64

COUNTER, KEY = st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1)


def words(number, count):
    return tuple(number >> 32 * i & 0xFFFFFFFF for i in range(count))


def found(counter, key):
    return list(map(int, philox4x32(words(counter, 4), words(key, 2))))


@pytest.mark.parametrize(("counter", "key", "block"), ANSWERS)
def test_the_published_blocks(counter, key, block):
    assert found(counter, key) == [int(word, 16) for word in block.split()]


@given(COUNTER, KEY)
def test_any_block_is_that_of_the_rounds_on_integers(counter, key):
    assert found(counter, key) == philox(key, counter)


def test_counters_and_keys_broadcast():
    rows, columns = np.arange(3)[:, None], np.arange(5, dtype=np.int32)
    block = philox4x32((rows, 7, columns, 2**32 - 1), (np.uint32(11), 13))
    for row in range(3):
        for column in range(5):
            counter = row | 7 << 32 | column << 64 | (2**32 - 1) << 96
            assert [int(word[row, column]) for word in block] == philox(11 | 13 << 32, counter)


def test_halves_of_64_bits():
    low, high = split64(np.array([0x123456789ABCDEF0, 2**64 - 1], dtype=np.uint64))
    assert low.tolist() == [0x9ABCDEF0, 2**32 - 1]
    assert high.tolist() == [0x12345678, 2**32 - 1]
