"""Places in the random streams are those that drawing leads to; what stages tell is read back."""

import random
from collections import namedtuple

import pytest
import torch
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard, StridedShard
from vescale_parallel import PipelineError
from vescale_parallel._pipeline.described import Described, TensorSpec
from vescale_parallel._pipeline.streams import Streams, after, words_between
from vescale_parallel._pipeline.text import from_text, to_text
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


Pair = namedtuple("Pair", "first second")
PLACEMENTS = [
    Shard(1),
    Replicate(),
    Partial("avg"),
    RaggedShard((0, 1), (1, 0, 2)),
    InterleavedShard(0, 3),
    StridedShard(0, 2),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements(placement: object):
    spec = TensorSpec(torch.bfloat16, (2, 3), (3, 1), (placement,), (4, 3), (3, 1), True)
    assert from_text(to_text(spec)) == spec
    described = Described({"a": [1, "b", None]}, (spec,))
    assert from_text(to_text(described)) == described


def test_named_tuples_of_modules():
    found = from_text(to_text({"a": Pair(1, [Pair("b", None)])}))
    assert found == {"a": Pair(1, [Pair("b", None)])}
    assert type(found["a"]) is type(found["a"].second[0]) is Pair


@pytest.mark.parametrize("value", [object(), namedtuple("Nowhere", "x")(1)])
def test_other_values_are_refused(value: object):
    with pytest.raises(PipelineError, match=type(value).__name__):
        to_text([value])
