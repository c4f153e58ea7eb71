"""Places in the random streams are those that drawing leads to; what stages tell is read back."""

import contextlib
import random
import sys
from collections import namedtuple

import pytest
import torch
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor.placement_types import StridedShard
from vescale_parallel import PipelineError
from vescale_parallel._pipeline.trace.streams import Streams, after, words_between
from vescale_parallel._pipeline.trace.tensor_specs import NestedSpecs, TensorSpec
from vescale_parallel._pipeline.trace.text import from_text, to_text
from vescale_rng.streams import position


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
    described = NestedSpecs({"a": [1, "b", None]}, (spec,))
    assert from_text(to_text(described)) == described


def test_named_tuples_of_modules():
    found = from_text(to_text({"a": Pair(1, [Pair("b", None)])}))
    assert found == {"a": Pair(1, [Pair("b", None)])}
    assert type(found["a"]) is type(found["a"].second[0]) is Pair


@pytest.mark.parametrize("value", [object(), namedtuple("Nowhere", "x")(1)])
def test_other_values_are_refused(value: object):
    with pytest.raises(PipelineError, match=type(value).__name__):
        to_text([value])


# What no stage says: names of what is not meant, other forms, and what has no end.
ODD = [
    '{"dtype": "load"}', '{"dtype": "hub"}', '{"dtype": 3}', '{"placement": "init_device_mesh"}',
    '{"placement": "Placement.__class__", "of": {"tuple": []}}', '{"placement": "Shard"}',
    '{"placement": "Shard", "of": {"tuple": [1, 2, 3]}}', '{"record": "Popen", "of": []}',
    '{"output": "antigravity:geohash", "of": []}', '{"output": "subprocess:Popen", "of": []}',
    '{"output": "transformers.modeling_outputs:ModelOutput", "of": []}', '{"output": "os"}',
    '{"output": 3, "of": []}', '{"set": [1]}', "{}", '{"list": [1], "tuple": []}', '{"list": 3}',
    '{"dict": [[1]]}', '{"dict": [[{"list": []}, 1]]}', '{"number": "x"}', "", "[" * 100_000,
    "9" * 5000, "not JSON",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_what_no_stage_says_is_refused_and_imports_nothing(text: str):
    before = set(sys.modules)
    with pytest.raises(PipelineError, match="was told what no stage says"):
        from_text(text)
    assert set(sys.modules) == before


def test_numbers_that_json_lacks_are_told():
    found = from_text(to_text([float("nan"), float("inf")]))
    assert str(found) == "[nan, inf]"


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_words_with_changes_are_read_or_refused(rounds: int):
    spec = TensorSpec(torch.bfloat16, (2, 3), (3, 1), (Shard(1), Partial()), (4, 3), (3, 1), True)
    healthy = to_text(NestedSpecs({"a": [1, "b", None], 3: (Pair(1, 2.5),)}, (spec,)))
    dice = random.Random(49)
    for _ in range(rounds):
        text = healthy
        for _ in range(dice.randrange(1, 4)):
            at, start = dice.randrange(len(text)), dice.randrange(len(text))
            piece = dice.choice(["", "9", '"', "[", "{", "null", text[start : start + 9]])
            text = text[:at] + piece + text[at + dice.randrange(4) :]
        with contextlib.suppress(PipelineError):
            from_text(text)
