"""Places in the random streams are those that drawing leads to, however they are found."""

import random

import pytest
import torch
from vescale_parallel._pipeline.streams import Streams, after, words_between
from vescale_rng import position


def moved(seed: int) -> random.Random:
    """Set the default generator somewhere, in some cases with a sample kept for later."""
    draw = random.Random(seed)
    torch.manual_seed(draw.randrange(1000))
    torch.rand(draw.choice([0, 1, 623, 624, draw.randrange(5000)]))
    if draw.random() < 0.3:
        torch.randn(draw.choice([1, 3]))
    return draw


@pytest.mark.parametrize("seed", range(20))
def test_a_place_after_words_is_where_drawing_them_ends(seed: int):
    draw, streams = moved(seed), Streams("cpu")
    words = draw.choice([0, 1, 623, 624, 625, draw.randrange(200_000)])
    start = streams.here()
    streams.skip([words])
    end = streams.here()
    assert after(start, [words]) == end
    assert end == (position(),)
    assert words_between(start, end, "it") == (words,)


@pytest.mark.parametrize("seed", range(20))
def test_it_goes_back_whoever_has_drawn(seed: int):
    draw, streams = moved(seed), Streams("cpu")
    start, state = streams.here(), torch.get_rng_state()
    torch.rand(draw.randrange(1, 3000))
    if draw.random() < 0.5:
        streams.here()  # known or not, where it stands now
    streams.seek(start)
    assert streams.here() == start
    found = torch.rand(2000)
    torch.set_rng_state(state)
    assert torch.equal(found, torch.rand(2000))
