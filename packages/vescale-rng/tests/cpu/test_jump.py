"""Property: moving the stream past n draws gives the words, and the state, that n draws leave.

The oracle is torch drawing. Distances too long to draw are tied to short ones by addition.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vescale_rng import RngError
from vescale_rng.streams import advance, position, seek

BOUNDARIES = (1, 2, 623, 624, 625, 1247, 1248, 1249, 624 * 5, 10_000, 1_000_003)


def seeded(seed, used):
    generator = torch.Generator().manual_seed(seed)
    torch.empty(used, dtype=torch.uint8).random_(generator=generator)
    return generator


@pytest.mark.smoke
@pytest.mark.parametrize("used", [0, 1, 623, 624, 625])
@pytest.mark.parametrize("words", BOUNDARIES)
def test_a_jump_is_as_many_draws(used, words):
    drawn, moved = seeded(7, used), seeded(7, used)
    torch.empty(words, dtype=torch.uint8).random_(generator=drawn)
    seek(position(moved).after(words), moved)
    assert torch.equal(moved.get_state(), drawn.get_state())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2000), st.integers(0, 5000))
def test_any_seed_and_any_place(seed, used, words):
    drawn, moved = seeded(seed, used), seeded(seed, used)
    torch.empty(words, dtype=torch.uint8).random_(generator=drawn)
    seek(position(moved).after(words), moved)
    assert torch.equal(moved.get_state(), drawn.get_state())


@given(st.integers(0, 2**63), st.integers(0, 2**63))
@settings(max_examples=8)
def test_distances_add_up(a, b):
    start = position(seeded(3, 17))
    assert start.after(a).after(b) == start.after(a + b)


def test_doubling_ties_astronomic_distances_to_drawn_ones():
    start = position(seeded(11, 5))
    for exponent in range(10, 60, 7):
        half = 2**exponent
        assert start.after(half).after(half) == start.after(2 * half)


@pytest.mark.parametrize("words", [0, 1, 70_000, (1 << 20) - 1, 1 << 20])
def test_advance_draws_or_jumps_to_the_same_place(words):
    drawn, moved = seeded(5, 3), seeded(5, 3)
    torch.empty(words, dtype=torch.uint8).random_(generator=drawn)
    advance(words, moved)
    assert torch.equal(moved.get_state(), drawn.get_state())


def test_a_jump_keeps_the_cached_normal():
    drawn, moved = seeded(5, 0), seeded(5, 0)
    for generator in (drawn, moved):
        torch.empty(1).normal_(generator=generator)
    torch.empty(5000, dtype=torch.uint8).random_(generator=drawn)
    seek(position(moved).after(5000), moved)
    assert torch.equal(moved.get_state(), drawn.get_state())


def test_there_is_no_way_back():
    before = torch.get_rng_state()
    with pytest.raises(RngError, match="-3"):
        advance(-3)
    with pytest.raises(RngError, match="-3"):
        position().after(-3)
    assert torch.equal(torch.get_rng_state(), before)
